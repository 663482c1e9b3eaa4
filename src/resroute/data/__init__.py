"""Text, tokens and corpora: from a file or the storyworld generator to batches."""

from resroute.data.corpora import SPLITS, Corpus, CorpusMeta, Split, SplitMeta, open_corpus
from resroute.data.evaluation import IGNORED_TARGET, EvaluationSet, Floor, evaluation_windows
from resroute.data.loader import Mixture, open_mixture, training_batch
from resroute.data.order import Order
from resroute.data.prepare import prepare_storyworld, prepare_text
from resroute.data.storyworld import Story, stories
from resroute.data.subword import (
    SubwordTokenizer,
    tokenizer_from_dict,
    vocabulary_difference,
)
from resroute.data.text import Separator, Survey, TextReader, survey_text
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer, Tokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORED_TARGET",
    "SPLITS",
    "CharTokenizer",
    "Corpus",
    "CorpusMeta",
    "EvaluationSet",
    "Floor",
    "Mixture",
    "Order",
    "Separator",
    "Split",
    "SplitMeta",
    "Story",
    "SubwordTokenizer",
    "Survey",
    "TextReader",
    "Tokenizer",
    "evaluation_windows",
    "open_corpus",
    "open_mixture",
    "prepare_storyworld",
    "prepare_text",
    "stories",
    "survey_text",
    "tokenizer_from_dict",
    "training_batch",
    "vocabulary_difference",
]
