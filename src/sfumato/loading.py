"""`sfumato.load`: a finished training, ready to predict."""

from __future__ import annotations

from sfumato.cli.trained import Trained as Trained
from sfumato.cli.trained import load as load
