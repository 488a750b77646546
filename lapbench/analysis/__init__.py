"""Token geometry: how alike the tokens of a sequence, a class and a data set are."""

from lapbench.analysis.similarity import within_sequence_similarity

__all__ = ["within_sequence_similarity"]
