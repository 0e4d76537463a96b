"""Convex learning with a little public data: linear models as scikit-learn estimators."""

from sfumato.erm.descent import DPSGDClassifier, DPSGDRegressor
from sfumato.erm.losses import Hinge, Huber, HuberisedHinge, Logistic, Square
from sfumato.erm.plain import NonPrivateClassifier, NonPrivateRegressor, PublicOnlyClassifier, PublicOnlyRegressor
from sfumato.erm.ppsgd import PPSGDClassifier, PPSGDRegressor
from sfumato.erm.preprocessing import PublicScaler

__all__ = [
    "DPSGDClassifier",
    "DPSGDRegressor",
    "Hinge",
    "Huber",
    "HuberisedHinge",
    "Logistic",
    "NonPrivateClassifier",
    "NonPrivateRegressor",
    "PPSGDClassifier",
    "PPSGDRegressor",
    "PublicOnlyClassifier",
    "PublicOnlyRegressor",
    "PublicScaler",
    "Square",
]
