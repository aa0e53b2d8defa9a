"""The element-wise heart of linear_cross_entropy: three small ops that work on one chunk of logits, in place.

Legend: C rows of one chunk, V vocabulary. Each op mutates what its schema marks and returns nothing, so that nothing is
allocated inside it (on the plain path a tile of rows of at most TILE elements, or one row, is upcast at a time).

For a row with logits x, z = softcap * tanh(x / softcap) (or x), y the label, e the label smoothing:
    lse  = log sum_j exp(z_j)
    loss = lse - (1 - e) z_y - e/V sum_j z_j + z_loss * lse^2
    dz_j = p_scale * exp(z_j - lse) - y_scale * ((1 - e) [j = y] + e/V),    dx_j = dz_j (1 - (z_j / softcap)^2)
with p_scale = s (1 + 2 z_loss lse), y_scale = s for a loss that enters the total with factor s. A row whose label is
ignore_index gets loss 0, lse 0 and an exactly zero gradient.
"""

from torch import Tensor

from hfpatch.ops._library import define, use_kernel, wide_dtype

TILE = 1 << 18


def _tiles(logits_CV: Tensor):
    rows, vocab_size = logits_CV.shape
    step = max(1, TILE // max(1, vocab_size))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _upcast_and_cap(logits_RV: Tensor, softcap: float) -> Tensor:
    z_RV = logits_RV.to(wide_dtype(logits_RV.dtype), copy=True)
    return z_RV.div_(softcap).tanh_().mul_(softcap) if softcap else z_RV


def _gradient_(
    z_RV: Tensor, labels_R1, keep_R1, lse_R1, p_scale_R1, y_scale_R1, smoothing: float, softcap: float
) -> Tensor:
    """dx of the head of this file; z_RV is consumed."""
    slope_RV = z_RV.div(softcap).square_().neg_().add_(1.0) if softcap else None
    vocab_size = z_RV.shape[1]
    d_RV = z_RV.sub_(lse_R1).exp_().mul_(p_scale_R1)
    if smoothing:
        d_RV.sub_(y_scale_R1 * (smoothing / vocab_size))
    d_RV.scatter_add_(1, labels_R1, y_scale_R1 * -(1.0 - smoothing))
    if slope_RV is not None:
        d_RV.mul_(slope_RV)
    return d_RV.masked_fill_(~keep_R1, 0.0)


def cross_entropy_chunk_plain_(
    logits_CV: Tensor,
    labels_C: Tensor,
    scale: Tensor,
    loss_C: Tensor,
    lse_C: Tensor,
    correct_C: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    grad: bool,
) -> None:
    """`hfpatch::cross_entropy_chunk_` in plain torch; computes in float32, or float64 where the logits are."""
    for rows in _tiles(logits_CV):
        z_RV = _upcast_and_cap(logits_CV[rows], softcap)
        vocab_size = z_RV.shape[1]
        keep_R1 = (labels_C[rows] != ignore_index).unsqueeze(1)
        labels_R1 = labels_C[rows].long().unsqueeze(1).clamp(0, vocab_size - 1)
        lse_R1 = z_RV.logsumexp(1, keepdim=True)
        loss_R1 = lse_R1 - (1.0 - smoothing) * z_RV.gather(1, labels_R1) + z_loss * lse_R1.square()
        if smoothing:
            loss_R1 -= smoothing / vocab_size * z_RV.sum(1, keepdim=True)
        loss_C[rows] = loss_R1.masked_fill_(~keep_R1, 0.0).squeeze(1)
        lse_C[rows] = lse_R1.masked_fill(~keep_R1, 0.0).squeeze(1)
        if correct_C is not None:
            correct_C[rows] = ((z_RV.argmax(1, keepdim=True) == labels_R1) & keep_R1).squeeze(1)
        if grad:
            p_scale_R1 = scale * (1.0 + 2.0 * z_loss * lse_R1)
            y_scale_R1 = scale.expand_as(p_scale_R1)
            logits_CV[rows] = _gradient_(
                z_RV, labels_R1, keep_R1, lse_R1, p_scale_R1, y_scale_R1, smoothing, softcap
            ).to(logits_CV.dtype)


def cross_entropy_chunk_bwd_plain_(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    p_scale_C: Tensor,
    y_scale_C: Tensor,
    ignore_index: int,
    smoothing: float,
    softcap: float,
) -> None:
    """`hfpatch::cross_entropy_chunk_bwd_` in plain torch."""
    for rows in _tiles(logits_CV):
        z_RV = _upcast_and_cap(logits_CV[rows], softcap)
        keep_R1 = (labels_C[rows] != ignore_index).unsqueeze(1)
        labels_R1 = labels_C[rows].long().unsqueeze(1).clamp(0, z_RV.shape[1] - 1)
        lse_R1, p_scale_R1, y_scale_R1 = (t[rows].unsqueeze(1) for t in (lse_C, p_scale_C, y_scale_C))
        logits_CV[rows] = _gradient_(z_RV, labels_R1, keep_R1, lse_R1, p_scale_R1, y_scale_R1, smoothing, softcap).to(
            logits_CV.dtype
        )


def _chunk(*args) -> None:
    if use_kernel(args[0]):
        from hfpatch.kernels.cross_entropy import cross_entropy_fwd

        cross_entropy_fwd(*args)
    else:
        cross_entropy_chunk_plain_(*args)


def _chunk_bwd(*args) -> None:
    if use_kernel(args[0]):
        from hfpatch.kernels.cross_entropy import cross_entropy_bwd

        cross_entropy_bwd(*args)
    else:
        cross_entropy_chunk_bwd_plain_(*args)


def _scale(x: Tensor, factor: Tensor) -> None:
    if use_kernel(x) and x.is_contiguous():
        from hfpatch.kernels.cross_entropy import scale_

        scale_(x, factor)
    else:
        # In float32: a 16-bit x would otherwise round the factor first.
        for part in x.view(-1).split(TILE):
            part.copy_(part * factor if part.dtype == factor.dtype else part.to(factor.dtype) * factor)


def _no_output(*args) -> None:
    return None


# logits become their gradient where `grad`; softcap 0 means none; scale is a 0-d tensor on the device.
cross_entropy_chunk_ = define(
    "cross_entropy_chunk_(Tensor(a!) logits, Tensor labels, Tensor scale, Tensor(b!) loss, Tensor(c!) lse,"
    " Tensor(d!)? correct, int ignore_index, float smoothing, float softcap, float z_loss, bool grad) -> ()",
    _chunk,
    _no_output,
)
# p_scale and y_scale, one value a row: the factors of the softmax and of the label (head of this file).
cross_entropy_chunk_bwd_ = define(
    "cross_entropy_chunk_bwd_(Tensor(a!) logits, Tensor labels, Tensor lse, Tensor p_scale, Tensor y_scale,"
    " int ignore_index, float smoothing, float softcap) -> ()",
    _chunk_bwd,
    _no_output,
)
# x *= factor. The kernel reads the factor on the device and leaves x alone where it is 1, as after loss.backward().
scale_ = define("scale_(Tensor(a!) x, Tensor factor) -> ()", _scale, _no_output)
