"""Token geometry: how alike the tokens of a sequence, a class and a data set are, and what they spread over."""

from lapbench.analysis.anova import TokenANOVA
from lapbench.analysis.pca import PrincipalComponents, TokenPCA, feature_maps
from lapbench.analysis.similarity import WithinSequenceSimilarity, within_sequence_similarity
from lapbench.analysis.spectrum import TokenSpectrum

__all__ = [
    "PrincipalComponents",
    "TokenANOVA",
    "TokenPCA",
    "TokenSpectrum",
    "WithinSequenceSimilarity",
    "feature_maps",
    "within_sequence_similarity",
]
