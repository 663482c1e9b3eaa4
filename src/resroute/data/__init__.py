"""Text, tokens and corpora: from a file or the storyworld generator to batches."""

from resroute.data.corpora import SPLITS, Corpus, CorpusMeta, Split, SplitMeta, open_corpus
from resroute.data.describe import Description, describe, render
from resroute.data.evaluation import (
    IGNORED_TARGET,
    EvaluationSet,
    Floor,
    evaluation_windows,
    parts_of,
)
from resroute.data.loader import Mixture, open_mixture, training_batch
from resroute.data.order import Order
from resroute.data.prepare import Tokens, prepare_published, prepare_text
from resroute.data.prepare_storyworld import prepare_storyworld
from resroute.data.published import PUBLISHED, fetch, local
from resroute.data.storyworld import Story, stories
from resroute.data.storyworld_knobs import StoryConfig
from resroute.data.subword import (
    SubwordTokenizer,
    tokenizer_from_dict,
    vocabulary_difference,
)
from resroute.data.text import Separator, Survey, TextReader, survey_text
from resroute.data.tokenizer import END_OF_TEXT, UNKNOWN, CharTokenizer, Tokenizer, Unknown

__all__ = [
    "END_OF_TEXT",
    "IGNORED_TARGET",
    "PUBLISHED",
    "SPLITS",
    "UNKNOWN",
    "CharTokenizer",
    "Corpus",
    "CorpusMeta",
    "Description",
    "EvaluationSet",
    "Floor",
    "Mixture",
    "Order",
    "Separator",
    "Split",
    "SplitMeta",
    "Story",
    "StoryConfig",
    "SubwordTokenizer",
    "Survey",
    "TextReader",
    "Tokenizer",
    "Tokens",
    "Unknown",
    "describe",
    "evaluation_windows",
    "fetch",
    "local",
    "open_corpus",
    "open_mixture",
    "parts_of",
    "prepare_published",
    "prepare_storyworld",
    "prepare_text",
    "render",
    "stories",
    "survey_text",
    "tokenizer_from_dict",
    "training_batch",
    "vocabulary_difference",
]
