"""diffprivlib's PCA, in an environment of its own: it needs an older scikit-learn than ours.

    PYTHON benchmarks/selection_peer.py rows.npz components.npz

Reads rows of norm at most 1, the epsilons and seeds; writes the components of every fit, and how long it took. A fit
that takes longer than `limit` seconds is given up, and so are those with more epsilon: its rejection sampling slows
down with epsilon times the number of rows. Their components are NaN.
"""

import signal
import sys
import time
import warnings

import numpy as np


def main(source: str, target: str) -> None:
    import diffprivlib

    given = np.load(source)
    rows, components = given["rows"], int(given["components"])
    found = np.full((len(given["epsilons"]), len(given["seeds"]), components, rows.shape[1]), np.nan)
    seconds = []
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, give_up)
    try:
        for i, epsilon in enumerate(given["epsilons"]):
            for j, seed in enumerate(given["seeds"]):
                # Rows count as centred, so that all of epsilon goes into directions and none into a mean.
                model = diffprivlib.models.PCA(
                    components, epsilon=float(epsilon), data_norm=1.0, centered=True, random_state=int(seed)
                )
                signal.alarm(int(given["limit"]))
                start = time.perf_counter()
                found[i, j] = model.fit(rows).components_
                seconds.append(time.perf_counter() - start)
    except TimeoutError:
        pass
    signal.alarm(0)
    np.savez(target, components=found, seconds=seconds, version=diffprivlib.__version__)


def give_up(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main(*sys.argv[1:])
