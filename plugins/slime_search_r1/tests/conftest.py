import json

import pytest


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"key": "tea", "text": "kettle"}, {"key": "ink", "text": "pen"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
