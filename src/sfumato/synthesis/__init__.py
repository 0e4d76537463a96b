"""More public data, made from public data: diffusion models of images, copulas of tables, and what they are worth.

Costs no privacy: nothing private is touched.
"""

from sfumato.synthesis.ddpm import Ddpm
from sfumato.synthesis.discriminator import Guidance, discriminator, train_discriminator, train_guidance
from sfumato.synthesis.edm import Edm
from sfumato.synthesis.features import Features, lite0_classes, lite0_features, pixel_features
from sfumato.synthesis.generator import Generator
from sfumato.synthesis.grid import grid
from sfumato.synthesis.heun import Churn, heun
from sfumato.synthesis.measures import Measured, cas, fid, inception_score, precision, recall
from sfumato.synthesis.memorised import Memorised, memorised
from sfumato.synthesis.nonleaking import AUGMENT_LABELS, NonLeaking
from sfumato.synthesis.synthetic import Synthetic
from sfumato.synthesis.tables import TableGenerator, fit_table
from sfumato.synthesis.training import train_generator
from sfumato.synthesis.unet import cifar_unet, ddpmpp_unet, digits_unet, unet

__all__ = [
    "AUGMENT_LABELS",
    "Churn",
    "Ddpm",
    "Edm",
    "Features",
    "Generator",
    "Guidance",
    "Measured",
    "Memorised",
    "NonLeaking",
    "Synthetic",
    "TableGenerator",
    "cas",
    "cifar_unet",
    "ddpmpp_unet",
    "digits_unet",
    "discriminator",
    "fid",
    "fit_table",
    "grid",
    "heun",
    "inception_score",
    "lite0_classes",
    "lite0_features",
    "memorised",
    "pixel_features",
    "precision",
    "recall",
    "train_discriminator",
    "train_generator",
    "train_guidance",
    "unet",
]
