"""The operations on a batch of images, each image with its own: every result is Pillow's, grey level for grey level.

All images go through all three functions, and are left as they are by those that are not theirs. So shapes do not
depend on what was drawn, the GPU is never waited for, and a CUDA graph can record it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.augment.batch import grey
from sfumato.augment.policy import Operation

ONE = 1 << 16
"""A pixel in fixed-point coordinates, with which the same pixel is fetched on every device."""


def moved(images: Tensor, movement: Tensor) -> Tensor:
    """Each image fetched by its own affine map (N, 6) of `fixed_point`, nearest pixel; grey beyond the edges."""
    N, C, H, W = images.shape
    x, y = torch.arange(W, device=images.device), torch.arange(H, device=images.device)[:, None]
    a, b, c, d, e, f = movement[:, :, None, None].unbind(1)
    from_x, from_y = (a * x + b * y + c) >> 16, (d * x + e * y + f) >> 16
    inside = (from_x >= 0) & (from_x < W) & (from_y >= 0) & (from_y < H)
    source = torch.where(inside, from_y * W + from_x, 0).reshape(N, 1, H * W).expand(-1, C, -1)
    return images.reshape(N, C, H * W).gather(2, source).view(N, C, H, W).masked_fill(~inside[:, None], grey(images))


def fixed_point(a: float, b: float, c: float, d: float, e: float, f: float) -> list[int]:
    """An affine map of points, for the middles of pixels, in units of 1 / ONE."""
    middle = (a, b, c + (a + b) / 2, d, e, f + (d + e) / 2)
    return [int((v * ONE + 0.5) // 1) for v in middle]


def blended(levels: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """Brightness, colour, contrast, sharpness: dull + factor * (image - dull), of uint8 images."""
    of, image = _each(operation), levels.float()
    intensity = _intensity(levels)
    pixels = levels.shape[2] * levels.shape[3]
    mean = (2 * intensity.sum((2, 3), keepdim=True) + pixels) // (2 * pixels)  # rounded, in whole numbers
    dull = torch.where(of == Operation.CONTRAST, mean, 0).float()
    dull = torch.where(of == Operation.COLOR, intensity, dull)
    dull = torch.where(of == Operation.SHARPNESS, _smooth(image), dull)
    own = (of >= Operation.BRIGHTNESS) & (of <= Operation.SHARPNESS)
    by = torch.where(own, _each(factor), 1.0)
    return (image - dull).mul_(by).add_(dull).clamp_(0, 255).to(torch.uint8)


def _intensity(levels: Tensor) -> Tensor:
    """(N, 1, H, W): ITU-R 601-2 luma, with Pillow's integers."""
    if levels.shape[1] == 1:
        return levels.int()
    red, green, blue = levels.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16)[:, None]


def _smooth(image: Tensor) -> Tensor:
    """Means over 3 x 3 pixels of which the middle one weighs 5; the border is left as it is."""
    down = image[:, :, :-2] + image[:, :, 1:-1] + image[:, :, 2:]
    around = down[..., :-2] + down[..., 1:-1] + down[..., 2:]
    smooth = image.clone()
    smooth[:, :, 1:-1, 1:-1] = around.add_(image[:, :, 1:-1, 1:-1], alpha=4).div_(13).add_(0.5).floor_()
    return smooth


def looked_up(levels: Tensor, operation: Tensor, amount: Tensor) -> Tensor:
    """Posterise, solarise, auto-contrast, equalise, invert: a table of 256 grey levels per channel of uint8 images."""
    N, C, H, W = levels.shape
    of, by = _each(operation)[..., 0], _each(amount)[..., 0]
    before = torch.arange(256, device=levels.device).expand(N, C, 256)
    pixels = levels.reshape(N, C, H * W).long()

    width = torch.where(of == Operation.POSTERIZE, by, 1.0).long()
    table = before // width * width
    inverted = (of == Operation.INVERT) | ((of == Operation.SOLARIZE) & (before >= by))
    table = torch.where(inverted, 255 - before, table)
    table = torch.where(of == Operation.AUTO_CONTRAST, _stretched(before, pixels), table)
    table = torch.where(of == Operation.EQUALIZE, _equalized(before, pixels), table)
    return table.to(torch.uint8).gather(2, pixels).view(N, C, H, W)


def _stretched(before: Tensor, pixels: Tensor) -> Tensor:
    low, high = pixels.amin(2, keepdim=True), pixels.amax(2, keepdim=True)
    span = (high - low).clamp(min=1).double()
    scale = torch.full_like(span, 255) / span  # 255 / span would round twice
    stretched = (before * scale + -low * scale).clamp(0, 255).long()
    return torch.where(high > low, stretched, before)


def _equalized(before: Tensor, pixels: Tensor) -> Tensor:
    counts = torch.zeros(before.shape, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    brightest = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - brightest) // 255
    darker = counts.cumsum(2) - counts
    equalized = ((step // 2 + darker) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, equalized, before)


def _each(of_images: Tensor) -> Tensor:
    return of_images[:, None, None, None]
