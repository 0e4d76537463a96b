"""The pictures of the papers' ideas are what the library computes now."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from docs.ideas import multiplicity
from docs.ideas.__main__ import IDEAS, PAPERS
from docs.ideas.drawing import kept, numbers
from sfumato.privacy.noise import _HAS_AES


def picture(number: str) -> Path:
    return PAPERS / f"idea-{number}.svg"


@pytest.mark.parametrize("number", IDEAS)
def test_every_paper_has_its_picture(number: str) -> None:
    text = picture(number).read_text()
    assert set(kept(picture(number))) == set(IDEAS[number].Found.__dataclass_fields__)
    assert "<dc:date>" not in text
    assert min(map(float, re.findall(r"font-size: ([\d.]+)px", text))) >= 9
    assert re.search(rf"!\[[^\]]+\]\(idea-{number}\.svg\)\n", (PAPERS / f"{number}.md").read_text())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("number", IDEAS)
@pytest.mark.skipif(not _HAS_AES, reason="seeded noise repeats on machines of the same kind only")
def test_pictures_show_what_the_library_computes(number: str) -> None:
    """Within a hundredth of what is seen, as other machines round otherwise; but not what the diffusion model makes."""
    shown = kept(picture(number))
    computed = multiplicity.valleys() if number == "002" else vars(IDEAS[number].compute())
    for name, values in numbers(computed).items():
        now, then = np.asarray(values), np.asarray(shown[name])
        np.testing.assert_allclose(now, then, rtol=0.01, atol=0.01 * np.ptp(then), err_msg=name)
