"""Models of other libraries, by the folder or the name that a config gives; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sfumato.errors import InvalidArgument


class Logits(nn.Module):
    """A classifier of `transformers`, called with one tensor and answering with one."""

    def __init__(self, model: nn.Module, *, tokens: bool) -> None:
        super().__init__()
        self.model = model
        self._tokens = tokens

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.model(rows.long() if self._tokens else rows).logits
        return logits


def from_transformers(folder: Path, outputs: int, options: Mapping[str, Any]) -> nn.Module:
    """What `save_pretrained` wrote, with a head of as many outputs; a new head where the old one has another number."""
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError:
        raise InvalidArgument("[model] kind needs transformers: pip install 'sfumato[models]'.") from None
    if not (folder / "config.json").is_file():
        raise InvalidArgument(
            f"[model] kind names {str(folder)!r}, which has no config.json: give a folder that save_pretrained wrote."
        )
    found = library.AutoConfig.from_pretrained(folder, local_files_only=True, num_labels=outputs, **options)
    images = found.model_type in library.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    kind = library.AutoModelForImageClassification if images else library.AutoModelForSequenceClassification
    if any(folder.glob("*.safetensors")):
        model: nn.Module = kind.from_pretrained(
            folder, config=found, local_files_only=True, ignore_mismatched_sizes=True
        )
    else:
        model = kind.from_config(found)  # an architecture alone
    return Logits(model, tokens=not images)


def from_timm(name: str, outputs: int, options: Mapping[str, Any]) -> nn.Module:
    """A model of timm; pretrained weights come from a file, `options = {checkpoint_path = "..."}`."""
    try:
        timm: Any = importlib.import_module("timm")
    except Exception as error:  # it imports torchvision, which may be there and not fit
        raise InvalidArgument(f"[model] kind='timm:{name}' needs timm, which cannot be imported: {error}.") from None
    model: nn.Module = timm.create_model(name, num_classes=outputs, **options)
    return model
