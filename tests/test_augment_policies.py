"""AutoAugment against Pillow, grey level for grey level; CutMix by counting pixels; and what of them the door takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy.stats import ks_2samp
from torch import Tensor, nn

from sfumato import Budget, Clip, GradientMean, Objective, Private, cross_entropy
from sfumato.augment import Augmentation, AutoAugment, Chain, CutMix
from sfumato.augment.policy import CIFAR10, TRIVIAL, Operation, Policy, Step
from sfumato.errors import InvalidArgument
from sfumato.gradients.rowwise import check_augment

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
GREY = 127
NEVER = Step(Operation.INVERT, 0.0)


def photos(rows: int, C: int, H: int, W: int, seed: int = 0) -> Tensor:
    """Noise, dull noise, ramps, two tones and flat images, in turn."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int, *shape: int) -> Tensor:
        return torch.randint(0, n, shape, generator=generator)

    kinds: list[Callable[[], Tensor]] = [
        lambda: below(256, C, H, W),
        lambda: 60 + below(40, C, H, W),
        lambda: (torch.arange(H * W).view(1, H, W) * (1 + below(3, C, 1, 1)) // 3 + below(30, C, H, W)) % 256,
        lambda: below(2, C, H, W) * 200 + 17,
        lambda: below(256, C, 1, 1).expand(C, H, W),
    ]
    return torch.stack([kinds[row % len(kinds)]() for row in range(rows)]).to(torch.uint8)


def to_pillow(image: Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if len(image) == 1 else array)


def from_pillow(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def by_pillow(image: Image.Image, step: Step, sign: int) -> Image.Image:
    """The step as Pillow makes it, with magnitudes written out once more."""
    share = step.level / 9
    W, H = image.size
    grey = GREY if image.mode == "L" else (GREY,) * 3

    def fetched(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=grey)

    factor = 1 + 0.9 * share * sign
    done: dict[Operation, Callable[[], Image.Image]] = {
        Operation.SHEAR_X: lambda: fetched(1, 0.3 * share * sign, 0, 0, 1, 0),
        Operation.SHEAR_Y: lambda: fetched(1, 0, 0, 0.3 * share * sign, 1, 0),
        Operation.TRANSLATE_X: lambda: fetched(1, 0, sign * int(W * 150 / 331 * share), 0, 1, 0),
        Operation.TRANSLATE_Y: lambda: fetched(1, 0, 0, 0, 1, sign * int(H * 150 / 331 * share)),
        Operation.ROTATE: lambda: image.rotate(30 * share * sign, Image.Resampling.NEAREST, fillcolor=grey),
        Operation.BRIGHTNESS: lambda: ImageEnhance.Brightness(image).enhance(factor),
        Operation.COLOR: lambda: ImageEnhance.Color(image).enhance(factor),
        Operation.CONTRAST: lambda: ImageEnhance.Contrast(image).enhance(factor),
        Operation.SHARPNESS: lambda: ImageEnhance.Sharpness(image).enhance(factor),
        Operation.POSTERIZE: lambda: ImageOps.posterize(image, [8, 8, 7, 7, 6, 6, 5, 5, 4, 4][step.level]),
        Operation.SOLARIZE: lambda: ImageOps.solarize(image, 256 - 256 * share),
        Operation.AUTO_CONTRAST: lambda: ImageOps.autocontrast(image),
        Operation.EQUALIZE: lambda: ImageOps.equalize(image),
        Operation.INVERT: lambda: ImageOps.invert(image),
    }
    return done[step.operation]()


def equal(found: Tensor, expected: Image.Image) -> bool:
    return torch.equal(found, from_pillow(expected))


# ------------------------------------------------------------------------------------------------ operations

SIGNED = range(Operation.SHEAR_X, Operation.SHARPNESS + 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 7, 20), (3, 2, 5)], ids=str)
@pytest.mark.parametrize("operation", list(Operation)[1:], ids=lambda o: o.name)
def test_each_operation_is_pillows(operation: Operation, shape: tuple[int, int, int], device: str) -> None:
    images = photos(20, *shape)
    for level in range(10):
        torch.manual_seed(level)
        step = Step(operation, 1.0, level)
        views = AutoAugment(((step, NEVER),))(images.to(device)).cpu()
        assert views.dtype == torch.uint8
        signs = set()
        for view, image in zip(views, map(to_pillow, images), strict=True):
            first, second = (equal(view, by_pillow(image, step, sign)) for sign in (-1, 1))
            assert first or second
            signs |= {first - second}
        strong = level > 5 and shape[1] > 2 and operation in SIGNED and (operation, shape[0]) != (Operation.COLOR, 1)
        assert not strong or {-1, 1} <= signs


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_step_follows_the_first(device: str) -> None:
    images = photos(20, 3, 16, 16)
    first, second = Step(Operation.ROTATE, 1.0, 9), Step(Operation.EQUALIZE, 1.0)
    views = AutoAugment(((first, second),))(images.to(device)).cpu()
    for view, image in zip(views, map(to_pillow, images), strict=True):
        turned = [by_pillow(by_pillow(image, first, sign), second, 1) for sign in (-1, 1)]
        assert any(equal(view, t) for t in turned)


def outcomes(image: Image.Image, policy: Policy) -> Counter[bytes]:
    """Every result that the policy can have, with its chance."""
    found: Counter[bytes] = Counter()
    for first, second in policy:
        starts = [(image, 1 - first.probability)]
        starts += [(by_pillow(image, first, sign), first.probability / 2) for sign in (-1, 1)]
        for start, chance in starts:
            found[start.tobytes()] += chance * (1 - second.probability) / len(policy)
            for sign in (-1, 1):
                end = by_pillow(start, second, sign).tobytes()
                found[end] += chance * second.probability / 2 / len(policy)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_the_cifar10_policy_gives_what_pillow_gives_as_often(device: str) -> None:
    """Every result is a possible one; and, image by image, the possible ones come with their probabilities."""
    torch.manual_seed(0)
    rows = 1500
    for image in photos(2, 3, 12, 12, seed=1):
        views = AutoAugment()(image.expand(rows, -1, -1, -1).to(device)).cpu()
        seen = Counter(view.permute(1, 2, 0).numpy().tobytes() for view in views)
        possible = outcomes(to_pillow(image), CIFAR10)
        assert sum(possible.values()) == pytest.approx(1)
        assert set(seen) <= {key for key, chance in possible.items() if chance > 0}
        common = [key for key, chance in possible.items() if chance > 0.008]
        assert len(common) > 15
        for key in common:
            expected = rows * possible[key]
            assert abs(seen[key] - expected) < 5 * expected**0.5


def test_the_trivial_policy_is_one_operation_at_any_level() -> None:
    """Against the paper's list of 14, in which all are equally likely; inverting is not among them."""
    operations = Counter(first.operation for first, _ in TRIVIAL)
    assert set(operations) == set(Operation) - {Operation.INVERT}
    assert len(operations) == 14
    assert set(operations.values()) == {10}
    assert {first.level for first, _ in TRIVIAL} == set(range(10))
    assert {first.probability for first, _ in TRIVIAL} == {1.0}
    assert {second.probability for _, second in TRIVIAL} == {0.0}


def test_the_policy_is_the_published_one() -> None:
    """Another transcription: initials, probability in tenths, level; levels that mean nothing are left out."""
    letters = {o: o.name.split("_")[0][:2] + o.name.rpartition("_")[2][-1] for o in Operation}
    published = """
        INT1- COT26  ROE72 TRX39  SHS81 SHS93  SHY58 TRY79  AUT5- EQE9-
        SHY27 POE37  COR43 BRS67  SHS39 BRS79  EQE6- EQE5-  COT67 SHS65
        COR77 TRX58  EQE3- AUT4-  TRY43 SHS26  BRS96 COR28  SOE52 INT0-
        EQE2- AUT6-  EQE2- EQE6-  COR99 EQE6-  AUT8- SOE28  BRS13 COR70
        SOE45 AUT9-  TRY99 TRY79  AUT9- SOE83  EQE8- INT1-  TRY79 AUT9-
    """
    assert len(set(letters.values())) == len(letters)
    ours = [
        f"{letters[s.operation]}{round(10 * s.probability)}{s.level if s.operation < Operation.AUTO_CONTRAST else '-'}"
        for pair in CIFAR10
        for s in pair
    ]
    assert ours == published.split()


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_floats_are_changed_as_bytes_are(dtype: torch.dtype, device: str) -> None:
    images = photos(200, 3, 9, 8).to(device)
    found = []
    for given in (images, images.to(dtype) / 255):
        torch.manual_seed(0)
        found.append(AutoAugment()(given))
    as_bytes, as_floats = found
    assert as_floats.dtype == dtype
    nearest = (as_floats.double() * 255 - 0.5).ceil().to(torch.uint8)  # mid-grey, 0.5 or 127, is the same
    assert torch.equal(nearest, as_bytes)
    untouched = (as_bytes == images).all((1, 2, 3))
    assert torch.equal(as_floats[untouched], (images.to(dtype) / 255)[untouched])


def test_borders_are_mid_grey_and_finer_floats_are_kept_where_nothing_is_recoloured() -> None:
    images = torch.rand(10, 1, 6, 22) * 0.1
    views = AutoAugment(((Step(Operation.TRANSLATE_X, 1.0, 9), NEVER),))(images)
    shift = int(22 * 150 / 331)
    for view, image in zip(views, images, strict=True):
        left, right = view[..., :shift], view[..., -shift:]
        assert bool((left == 0.5).all()) != bool((right == 0.5).all())
        kept = image[..., shift:] if bool((right == 0.5).all()) else image[..., :-shift]
        assert torch.equal(view[view != 0.5], kept.reshape(-1))


@pytest.mark.parametrize("device", DEVICES)
def test_each_image_depends_on_itself_alone(device: str) -> None:
    labels = torch.arange(30, device=device) % 3
    pixels, others = photos(30, 3, 8, 8).to(device), photos(30, 3, 8, 8, seed=9).to(device)
    for augmentation, images in product(
        (AutoAugment(), Chain(Augmentation(2), AutoAugment())), (pixels, pixels.float() / 255)
    ):
        check_augment(augmentation, (images, labels))
    for seed, row in product(range(5), range(0, 30, 3)):
        changed = others.clone()
        changed[row] = pixels[row]
        views = []
        for images in (pixels, changed):
            torch.manual_seed(seed)
            views.append(AutoAugment()(images)[row])
            views.append(torch.rand(3, device=device))  # as many numbers were drawn
        assert torch.equal(views[0], views[2])
        assert torch.equal(views[1], views[3])


def test_what_else_a_batch_holds_is_left_alone() -> None:
    images, labels = photos(12, 3, 6, 6), torch.arange(12)
    before = images.clone()
    as_tuple, as_list = AutoAugment()((images, labels)), AutoAugment()([images, labels])
    assert isinstance(as_tuple, tuple)
    assert isinstance(as_list, list)
    for batch in (as_tuple, as_list):
        assert batch[1] is labels
        assert batch[0].shape == images.shape
        assert batch[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)
    assert torch.equal(AutoAugment(((NEVER, NEVER),))(images), images)
    assert AutoAugment()(images[:0]).shape == (0, 3, 6, 6)
    torch.manual_seed(5)
    expected = AutoAugment()(images)
    torch.manual_seed(5)
    assert torch.equal(AutoAugment()(images.contiguous(memory_format=torch.channels_last)), expected)


needs_gpu = pytest.mark.skipif(len(DEVICES) == 1, reason="needs a CUDA device")


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("augmentation", [AutoAugment(), CutMix(classes=50)], ids=["AutoAugment", "CutMix"])
def test_the_gpu_is_not_waited_for(augmentation: Callable[[Any], Any]) -> None:
    batch = photos(50, 3, 16, 16).cuda(), torch.arange(50).cuda()
    augmentation(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        augmentation(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_cuda_graph_can_record_autoaugment() -> None:
    images = photos(50, 3, 16, 16).cuda()
    AutoAugment()(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = AutoAugment()(images)
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append(views.clone())
    assert not torch.equal(*replayed)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.rand(4, 6, 6), r"\(4, 6, 6\)"),
        (torch.zeros(4, 3, 6, 6, dtype=torch.int64), "int64"),
        (torch.rand(4, 2, 6, 6), "2 channels"),
        ({"images": torch.rand(4, 3, 6, 6)}, "dict"),
    ],
)
def test_other_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        AutoAugment()(batch)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: AutoAugment(()), "policy="),
        (lambda: AutoAugment([(NEVER, NEVER)]), "policy="),
        (lambda: AutoAugment(((NEVER,),)), "policy="),
        (lambda: AutoAugment("cifar10"), "policy='cifar10'"),
        (lambda: Step(Operation.ROTATE, 1.1), "probability=1.1"),
        (lambda: Step(Operation.ROTATE, 0.5, 10), "level=10"),
        (lambda: Step("Rotate", 0.5), "operation='Rotate'"),
        (lambda: CutMix(alpha=0.0, classes=3), "alpha=0.0"),
        (lambda: CutMix(alpha=float("nan"), classes=3), "alpha=nan"),
        (lambda: CutMix(probability=-0.1, classes=3), "probability=-0.1"),
        (lambda: CutMix(classes=0), "classes=0"),
        (lambda: Chain([Augmentation()]), "one by one"),
    ],
)
def test_other_options_are_refused(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        made()


# ------------------------------------------------------------------------------------------------ CutMix


def numbered(rows: int, H: int, W: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Images whose pixels all hold the number of the image, which is its label too."""
    labels = torch.arange(rows, device=device)
    return labels.to(torch.uint8)[:, None, None, None].expand(-1, 3, H, W), labels


@pytest.mark.parametrize("device", DEVICES)
def test_labels_weigh_as_much_as_the_pixels_that_show_them(device: str) -> None:
    torch.manual_seed(0)
    rows, H, W = 200, 12, 17
    images, soft = CutMix(classes=rows)(numbered(rows, H, W, device))
    assert images.dtype == torch.uint8
    assert soft.dtype == torch.float32
    images, soft = images.cpu(), soft.cpu()
    shares = torch.stack([torch.bincount(image[0].flatten(), minlength=rows) / (H * W) for image in images])
    torch.testing.assert_close(soft, shares)
    assert bool((images == images[:, :1]).all())
    boxes = images[:, 0] != torch.arange(rows)[:, None, None]
    tall, wide = boxes.any(2), boxes.any(1)
    assert torch.equal(boxes, tall[:, :, None] & wide[:, None, :])
    for along in (tall, wide):
        assert int((along.int().diff(dim=1) == 1).sum(1).max()) <= 1  # one run
        assert bool(along.any(0).all())
    partners = [set(image.unique().tolist()) - {row} for row, image in enumerate(images)]
    assert all(len(found) <= 1 for found in partners)
    assert len(set.union(*partners)) > rows / 3  # drawn by each row for itself


def boxes_by_numpy(alpha: float, rows: int, size: int) -> Any:
    """Shares of the boxes of the paper's Algorithm A1 in whole pixels."""
    rng = np.random.default_rng(0)
    side = (size * np.sqrt(1 - rng.beta(alpha, alpha, rows))).astype(int)
    lengths = []
    for centre in (rng.integers(0, size, rows), rng.integers(0, size, rows)):
        lengths.append(np.clip(centre + side // 2, 0, size) - np.clip(centre - side // 2, 0, size))
    return lengths[0] * lengths[1] / size**2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alpha", [1.0, 0.2])
def test_boxes_are_as_large_as_the_papers(alpha: float, device: str) -> None:
    torch.manual_seed(0)
    rows, size = 4000, 16
    labels = torch.zeros(rows, dtype=torch.long, device=device)
    images = torch.arange(rows, device=device, dtype=torch.float32)[:, None, None, None].expand(-1, 1, size, size)
    views, _ = CutMix(alpha, classes=1)((images, labels))
    shares = (views != images).float().mean((1, 2, 3)).cpu().numpy()
    assert ks_2samp(shares, boxes_by_numpy(alpha, 20000, size)).pvalue > 1e-3
    assert ks_2samp(shares, boxes_by_numpy(1.5 * alpha, 20000, size)).pvalue < 1e-4


def test_limits_of_cutmix() -> None:
    torch.manual_seed(0)
    images, labels = numbered(100, 32, 32)
    same, one_hot = CutMix(probability=0.0, classes=100)((images, labels))
    assert torch.equal(same, images)
    assert torch.equal(one_hot, torch.eye(100))
    alone, own = CutMix(classes=100)((images[3:4], labels[3:4]))  # with nobody else
    assert torch.equal(alone, images[3:4])
    assert float(own[0, 3]) == 1
    empty, none = CutMix(classes=100)((images[:0], labels[:0]))
    assert (len(empty), none.shape) == (0, (0, 100))
    half, _ = CutMix(alpha=1e6, classes=100)((images, labels))  # lambda = 1/2: sides of 22 pixels, cut at the edges
    boxes = (half != images)[:, 0]
    assert int(boxes.any(2).sum(1).max()) == int(boxes.any(1).sum(1).max()) == 22
    for _ in range(20):  # never with itself
        two, _ = CutMix(alpha=1e6, classes=100)((images[:2], labels[:2]))
        assert bool((two != images[:2]).any(3).any(2).any(1).all())
    many = torch.arange(2000.0)[:, None, None, None].expand(-1, 1, 8, 8)
    some, _ = CutMix(alpha=1e6, probability=0.25, classes=1)((many, torch.zeros(2000, dtype=torch.long)))
    assert abs(int((some != many).any(3).any(2).any(1).sum()) - 500) < 5 * 20


def test_soft_labels_weigh_the_two_losses() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 4))
    images, labels = torch.rand(8, 3, 6, 6), torch.arange(8) % 4
    mixed, soft = CutMix(classes=4)((images, labels))
    by_class = torch.stack([cross_entropy(module, (mixed, torch.full((8,), c))) for c in range(4)], 1)
    torch.testing.assert_close(cross_entropy(module, (mixed, soft)), (soft * by_class).sum(1))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.rand(4, 3, 6, 6), "pair"),
        ((torch.rand(4, 3, 6, 6),), "pair"),
        ((torch.rand(4, 3, 6), torch.arange(4)), r"\(4, 3, 6\)"),
        ((torch.rand(4, 3, 6, 6), torch.rand(4, 3)), r"\(4, 3\)"),
        ((torch.rand(4, 3, 6, 6), torch.rand(4)), "float32"),
        ((torch.rand(4, 3, 6, 6), torch.arange(4)), "classes=3"),
        ((torch.rand(4, 3, 6, 6), torch.arange(4) - 2), "-2"),
    ],
)
def test_what_cutmix_cannot_mix_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CutMix(classes=3)(batch)


# ------------------------------------------------------------------------------------------------ Chain and the door


def test_a_chain_keeps_its_order() -> None:
    images, labels = photos(30, 3, 8, 8), torch.arange(30)
    torch.manual_seed(0)
    chained = Chain(Augmentation(2), AutoAugment(), CutMix(classes=30))((images, labels))
    torch.manual_seed(0)
    by_hand = CutMix(classes=30)(AutoAugment()(Augmentation(2)((images, labels))))
    for a, b in zip(chained, by_hand, strict=True):
        assert torch.equal(a, b)
    assert Chain(lambda b: b + 1, lambda b: b * 10)(1) == 20


def door() -> tuple[Private, Objective]:
    torch.manual_seed(0)
    data = torch.rand(200, 3, 6, 6), torch.arange(200) % 4
    objective = Objective(nn.Sequential(nn.Flatten(), nn.Linear(108, 4)), cross_entropy)
    return Private(data, name="people", size=200, objective=objective, budget=Budget(1.0, 1e-6)), objective


def ask(private: Private, objective: Objective, augment: Callable[[Any], Any]) -> None:
    question = GradientMean(objective.parameters(), Clip(1.0), views=2, augment=augment)
    private.ask(question, noise=50.0, sampler=private.everyone())


@pytest.mark.parametrize("probability", [1.0, 0.001])
@pytest.mark.parametrize("chained", [False, True])
def test_the_door_refuses_cutmix(probability: float, chained: bool) -> None:
    """It mixes rows: one person would enter other people's gradients, if only once in a while."""
    private, objective = door()
    cut_mix = CutMix(1.0, probability, classes=4)
    augment = Chain(Augmentation(2), cut_mix) if chained else cut_mix
    with pytest.raises(InvalidArgument, match="CutMix"):
        check_augment(augment, (torch.rand(40, 3, 6, 6), torch.arange(40) % 4))
    with pytest.raises(InvalidArgument, match="CutMix"):
        ask(private, objective, augment)
    assert private.account.epsilon_spent() == 0


def test_what_mixes_rows_and_does_not_say_so_is_seen() -> None:
    private, objective = door()
    with pytest.raises(InvalidArgument, match="CutMix"):
        ask(private, objective, lambda batch: CutMix(1.0, classes=4)(batch))
    assert private.account.epsilon_spent() == 0


def test_the_door_takes_autoaugment() -> None:
    private, objective = door()
    ask(private, objective, Chain(AutoAugment(), Augmentation(2)))
    assert private.account.epsilon_spent() > 0


def test_a_chain_that_begins_to_mix_rows_later_is_refused_then() -> None:
    class Curriculum:
        mixing = False

        def __call__(self, batch: Any) -> Any:
            x, y = batch
            return (x + x.mean(0) if self.mixing else x), y

    private, objective = door()
    curriculum = Curriculum()
    chain = Chain(AutoAugment(), curriculum)
    ask(private, objective, chain)
    curriculum.mixing = True
    with pytest.raises(InvalidArgument, match="augment"):
        ask(private, objective, chain)
