"""The benchmark of the LSTM: it checks what it times, and its table is made from data."""

import pytest
import torch

from benchmarks import lstm

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, from vmap


def test_what_is_timed_is_right_and_a_plain_gradient_is_not() -> None:
    lstm.check("sfumato", torch.device("cpu"))
    with pytest.raises(SystemExit, match="plain is wrong"):
        lstm.check("plain", torch.device("cpu"))


def test_the_table_is_made_from_data() -> None:
    row = {"method": "sfumato", "ratio": 1.234, "spread": 0.1, "seconds": 2.0, "words_per_second": 4375}
    machine = {"device": "a CPU", "threads": 1, "torch": "2", "load": 0.5}
    text = lstm.markdown({"machine": machine, "batch": 250, "rounds": 7, "rows": [row]})
    assert "| sfumato | 1.23 ± 0.05 | 4,375 |" in text
    assert "250 rows of 35 words, 7 rounds. a CPU, 1 threads" in text
