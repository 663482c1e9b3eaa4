"""Text, tokens and corpora: from a file or the storyworld generator to batches."""

from resroute.data.corpora import SPLITS, Corpus, CorpusMeta, Split, SplitMeta, open_corpus
from resroute.data.loader import (
    IGNORED_TARGET,
    EvaluationSet,
    Floor,
    evaluation_windows,
    training_batch,
)
from resroute.data.prepare import prepare_storyworld, prepare_text
from resroute.data.storyworld import Story, stories
from resroute.data.text import Separator, Survey, TextReader, survey_text
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORED_TARGET",
    "SPLITS",
    "CharTokenizer",
    "Corpus",
    "CorpusMeta",
    "EvaluationSet",
    "Floor",
    "Separator",
    "Split",
    "SplitMeta",
    "Story",
    "Survey",
    "TextReader",
    "evaluation_windows",
    "open_corpus",
    "prepare_storyworld",
    "prepare_text",
    "stories",
    "survey_text",
    "training_batch",
]
