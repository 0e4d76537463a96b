"""Convex learning with a little public data: linear models as scikit-learn estimators."""

from sfumato.erm.agd import AGDAverageClassifier, AGDAverageRegressor, AGDClassifier, AGDRegressor
from sfumato.erm.descent import DPSGDClassifier, DPSGDRegressor
from sfumato.erm.losses import Hinge, Huber, HuberisedHinge, Logistic, Square
from sfumato.erm.mirror_descent import MirrorDescentClassifier, MirrorDescentRegressor
from sfumato.erm.objective_perturbation import ObjectivePerturbationClassifier, ObjectivePerturbationRegressor
from sfumato.erm.output_perturbation import OutputPerturbationClassifier, OutputPerturbationRegressor
from sfumato.erm.plain import NonPrivateClassifier, NonPrivateRegressor, PublicOnlyClassifier, PublicOnlyRegressor
from sfumato.erm.pnsgd import PNSGDClassifier, PNSGDRegressor
from sfumato.erm.ppsgd import PPSGDClassifier, PPSGDRegressor
from sfumato.erm.preprocessing import PublicScaler
from sfumato.erm.sgd_advanced import SgdAdvancedClassifier, SgdAdvancedRegressor

__all__ = [
    "AGDAverageClassifier",
    "AGDAverageRegressor",
    "AGDClassifier",
    "AGDRegressor",
    "DPSGDClassifier",
    "DPSGDRegressor",
    "Hinge",
    "Huber",
    "HuberisedHinge",
    "Logistic",
    "MirrorDescentClassifier",
    "MirrorDescentRegressor",
    "NonPrivateClassifier",
    "NonPrivateRegressor",
    "ObjectivePerturbationClassifier",
    "ObjectivePerturbationRegressor",
    "OutputPerturbationClassifier",
    "OutputPerturbationRegressor",
    "PNSGDClassifier",
    "PNSGDRegressor",
    "PPSGDClassifier",
    "PPSGDRegressor",
    "PublicOnlyClassifier",
    "PublicOnlyRegressor",
    "PublicScaler",
    "SgdAdvancedClassifier",
    "SgdAdvancedRegressor",
    "Square",
]
