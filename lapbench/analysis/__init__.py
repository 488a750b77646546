"""Token geometry: how alike the tokens of a sequence, a class and a data set are, and what they spread over."""

from lapbench.analysis.anova import TokenANOVA
from lapbench.analysis.collapse import NearestMeanMismatch, NeuralCollapse
from lapbench.analysis.pca import PrincipalComponents, TokenPCA, feature_maps
from lapbench.analysis.similarity import WithinSequenceSimilarity, within_sequence_similarity
from lapbench.analysis.simplex import VERTICES, simplex_projection
from lapbench.analysis.spectrum import TokenSpectrum
from lapbench.analysis.sublayers import SublayerVariance

__all__ = [
    "VERTICES",
    "NearestMeanMismatch",
    "NeuralCollapse",
    "PrincipalComponents",
    "SublayerVariance",
    "TokenANOVA",
    "TokenPCA",
    "TokenSpectrum",
    "WithinSequenceSimilarity",
    "feature_maps",
    "simplex_projection",
    "within_sequence_similarity",
]
