import json

import pytest


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        json.dumps({"key": "tea", "text": "kettle"}) + "\n" + json.dumps({"key": "ink", "text": "pen"}) + "\n"
    )
    return path
