"""Dense retrieval with an embedding model made on the spot; needs the extra `dense`."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from slime_core import OptionError
from slime_search_r1.local import open_index

pytest.importorskip("faiss")
pytest.importorskip("sentence_transformers")

WORDS = ["[UNK]", "capital", "of", "wales", "a", "hot", "drink", "tea"]


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory) -> str:
    """A model whose embedding of a text is the mean of its words' own random directions."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = torch.randn(len(WORDS), 32, generator=torch.Generator().manual_seed(0))
    directory = tmp_path_factory.mktemp("embedding")
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights.numpy())]).save(str(directory))
    return str(directory)


def make_ranking(model: str):
    from slime_search_r1.dense import Dense

    return Dense(model, "", "")


def test_the_nearest_document_comes_first_and_the_index_is_kept(embedding_model, write_corpus):
    corpus = write_corpus([{"text": "capital of wales"}, {"text": "a hot drink"}, {"text": "tea"}])
    texts = [
        [hit.document.text for hit in open_index(corpus, None, make_ranking(embedding_model)).search("hot drink", 2)]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert (texts[0][0], len(texts[0])) == ("a hot drink", 2)
    assert corpus.with_name("corpus.jsonl.dense").is_dir()


def test_scores_are_cosines_and_results_no_more_than_documents(embedding_model, write_corpus):
    hits = open_index(write_corpus([{"text": "tea"}]), None, make_ranking(embedding_model)).search("tea", 5)
    assert [hit.score for hit in hits] == [pytest.approx(1.0, abs=1e-5)]


def test_a_model_that_cannot_be_loaded_names_the_flag(tmp_path):
    with pytest.raises(OptionError, match="--search-r1-embedding-model"):
        make_ranking(str(tmp_path / "nowhere"))
