"""Which public rows to label, so that a private model learns the most from them (paper 004)."""

from sfumato.selection.advice import Advice, QuestionAdvice, advise, advise_questions
from sfumato.selection.baselines import Entropy, KCenter, Margin, Random
from sfumato.selection.diverse_public import DiversePublic
from sfumato.selection.finetune import fine_tune
from sfumato.selection.near_private import NearPrivate
from sfumato.selection.pca import PrivatePCA
from sfumato.selection.released import Released, Views
from sfumato.selection.strategy import Ask, Strategy, entropy, margin
from sfumato.selection.support import Threshold, TopK, TopKHistogram

__all__ = [
    "Advice",
    "Ask",
    "DiversePublic",
    "Entropy",
    "KCenter",
    "Margin",
    "NearPrivate",
    "PrivatePCA",
    "QuestionAdvice",
    "Random",
    "Released",
    "Strategy",
    "Threshold",
    "TopK",
    "TopKHistogram",
    "Views",
    "advise",
    "advise_questions",
    "entropy",
    "fine_tune",
    "margin",
]
