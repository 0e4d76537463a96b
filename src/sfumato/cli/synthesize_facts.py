"""What is to be said of a synthesis, before it and afterwards; by `sfumato synthesize` and by `sfumato train`."""

from __future__ import annotations

from typing import Any

from sfumato.cli.synthesize_config import SynthesisConfig
from sfumato.cli.synthesize_job import Job


def plan(job: Job, *, again: bool) -> dict[str, Any]:
    """What would be done."""
    config, network, images = job.config, job.network, job.network is not None
    options = config.generator
    return {
        "public": config.data.public,
        "rows": len(job.rows.rows),
        "trained_on": len(job.kept),
        "held_out": len(job.held),
        "row": list(job.rows.rows.shape[1:]),
        "classes": _classes(job),
        "generator": (options.size or "own numbers") if images else "Gaussian copula",
        "process": options.process if images else None,
        "parameters": None if network is None else sum(p.numel() for p in network.parameters()),
        "images": options.images,
        "seconds": options.seconds,
        "batch_size": options.batch_size if images else None,
        "guidance": None if config.guidance is None else config.guidance.weight,
        "samples": config.sample.n,
        "measures": list(config.measure.wanted),
        "device": str(job.device),
        "continues": job.folder.began.exists() and not again,
    }


def _classes(job: Job) -> int | None:
    labels = job.rows.labels
    return None if labels is None or labels.is_floating_point() else len(set(labels.tolist()))


def result(config: SynthesisConfig, provenance: dict[str, Any]) -> dict[str, Any]:
    """What was done."""
    return {
        "folder": str(config.folder),
        "statement": provenance["statement"],
        "rows": provenance["rows"],
        "sha256": provenance["sha256"],
        "trained_on": provenance["public"]["trained_on"],
        "held_out": provenance["public"]["held_out"],
        "images_seen": provenance["generator"].get("images_seen"),
        "draws": len(provenance["draws"]),
        "measures": provenance["measures"] or None,  # where none was asked for, there is no line
        "seconds": provenance["seconds"],
    }
