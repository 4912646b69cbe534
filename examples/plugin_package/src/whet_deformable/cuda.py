"""A kernel for NVIDIA GPUs: one thread computes FILTERS filters of one pixel, so that each tap is interpolated once for all of them."""

from collections.abc import Mapping, Sequence

from whet.network import Layer, static_shape
from whet.tactics import Signature

BLOCK = 128
SOURCE = """
extern "C" __global__ void __launch_bounds__(128)
deformable_conv(const float* x, const float* w, const float* offset,
#if BIAS
                const float* bias,
#endif
                float* y, int pixels, int channels, int height, int width, int filters, int kh, int kw, int oh, int ow,
                int sv, int su, int pv, int pu) {
    const int p = blockIdx.x * 128 + threadIdx.x, first = blockIdx.y * FILTERS;
    if (p >= pixels) return;
    const int area = oh * ow, n = p / area, pixel = p % area, taps = kh * kw;
    float sum[FILTERS];
    for (int k = 0; k < FILTERS; ++k) sum[k] = 0.f;
    for (int t = 0; t < taps; ++t) {
        const float* shift = offset + (size_t)(n * taps + t) * 2 * area + pixel;
        const float v = pixel / ow * sv - pv + t / kw + shift[0], u = pixel % ow * su - pu + t % kw + shift[area];
        const float v0 = floorf(v), u0 = floorf(u);
        int at[4];
        float weight[4];
        for (int corner = 0; corner < 4; ++corner) {
            const float row = v0 + corner / 2, column = u0 + corner % 2;
            const bool inside = row >= 0 && row < height && column >= 0 && column < width;  // false for NaN
            at[corner] = inside ? (int)row * width + (int)column : 0;
            weight[corner] = inside ? (1 - fabsf(v - row)) * (1 - fabsf(u - column)) : 0.f;
        }
        for (int c = 0; c < channels; ++c) {
            const float* image = x + (size_t)(n * channels + c) * height * width;
            float value = 0.f;
            for (int corner = 0; corner < 4; ++corner) value += image[at[corner]] * weight[corner];
            for (int k = 0; k < FILTERS; ++k)
                if (first + k < filters) sum[k] += w[((size_t)(first + k) * channels + c) * taps + t] * value;
        }
    }
    for (int k = 0; k < FILTERS; ++k)
        if (first + k < filters) {
#if BIAS
            sum[k] += bias[first + k];
#endif
            y[((size_t)n * filters + first + k) * area + pixel] = sum[k];
        }
}
"""


def sizes(layer: Layer) -> list[int]:
    """Pixels, then the kernel's other integers."""
    (n, channels, height, width), (filters, _, kh, kw) = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1)))
    _, _, oh, ow = static_shape(layer.output.shape)
    return [n * oh * ow, channels, height, width, filters, kh, kw, oh, ow, *layer.attrs["strides"], *layer.attrs["pads"]]


def parameters(layer: Layer, config: Mapping[str, int | str]) -> Sequence[int]:
    """The parameters after the pointers."""
    return sizes(layer)


def configs(layer: Layer) -> list[dict[str, int | str]]:
    """Filters that a thread computes: whet times each of them."""
    return [{"filters": n} for n in (1, 4, 8)]


def macros(layer: Layer, signature: Signature, config: Mapping[str, int | str]) -> dict[str, int]:
    """Constants of the kernel."""
    return {"FILTERS": int(config["filters"]), "BIAS": int(layer.input(3) is not None)}


def grid(layer: Layer, config: Mapping[str, int | str]) -> tuple[int, int]:
    """Blocks of pixels, and groups of filters."""
    pixels, filters = sizes(layer)[0], sizes(layer)[4]
    return -(-pixels // BLOCK), -(-filters // int(config["filters"]))
