"""Three small ops on one chunk of logits, in place: the element-wise part of the losses.

Legend: C rows of one chunk, V vocabulary. Each op mutates the arguments that its schema marks and
returns nothing, so it allocates nothing. (The plain path upcasts a tile of at most TILE elements,
or one row, at a time.)

For a row with logits x, u = tanh(inner * x) (or x), z = outer * u, y the label, e the label
smoothing, p_j = exp(z_j - lse):
    lse  = log sum_j exp(z_j)               best = the first largest u
    loss = (1 - e) (lse - z_y) + e/V sum_j (lse - z_j) + z_loss * lse^2
    entropy = - sum_j p_j log p_j           mean = 1/V sum_j z_j           square = sum_j p_j^2
and the gradient of any combination of these is
    dz_j = p_j (P + H (log p_j + entropy) + Q p_j) - Y [j = y] - U,     dx_j = dz_j * dz/dx
with five factors a row. The loss, which enters a total with factor s, fills them in `loss_factors`;
linear_log_prob, with an upstream gradient g of each of its outputs, in `_factors` of
linear_cross_entropy.py.
         the loss              linear_log_prob
    Y    s (1 - e)             - g_log_prob
    U    s e/V                 - g_mean / V
    H    0                     - g_entropy
    Q    0                     2 g_square
    P    s + 2 s z_loss lse    Y + g_lse - Q square
A row whose label is ignore_index gets 0 for all outputs and an exactly zero gradient.

lse is kept as two numbers: the largest u, and log L with L = sum_j exp(z_j - largest z). For large
logits one rounding step of lse or z is many steps of a probability, while differences of u near the
largest are exact. The backward therefore takes factors for exp(z_j - largest z) = L p_j and its
logarithm: P / L, H / L, Q / L^2, entropy - log L.

Both ops take a matrix with a column per row of logits:
    outs_KC     loss, largest u, log L, then entropy, mean, square if requested (K > 4), then best
                if requested (a float: float32 counts to 16 million)
    factors_KC  largest u, P / L, Y, then U (K > 3), then entropy - log L, H / L, Q / L^2 (K > 4)
"""

import torch
from torch import Tensor

from hfpatch.ops._library import define, wide_dtype

TILE = 1 << 18


def _tiles(logits_CV: Tensor, labels_C: Tensor, ignore_index: int, inner: float):
    """Yields (rows, u_RV, ignored_R, labels_R1) of a few rows at a time.

    u_RV is a new tensor in the wide dtype. labels_R1 are columns, also where ignored.
    """
    n_rows, vocab_size = logits_CV.shape
    step = max(1, TILE // max(1, vocab_size))
    for start in range(0, n_rows, step):
        rows = slice(start, start + step)
        u_RV = logits_CV[rows].to(wide_dtype(logits_CV.dtype), copy=True)
        if inner:
            u_RV.mul_(inner).tanh_()
        labels_R = labels_C[rows]
        labels_R1 = labels_R.long().unsqueeze(1).clamp(0, vocab_size - 1)
        yield rows, u_RV, labels_R == ignore_index, labels_R1


def whole_lse(lse_2N: Tensor, outer: float) -> Tensor:
    """lse from its two numbers (see the top of this file); 0 where the label is ignored."""
    return outer * lse_2N[0] + lse_2N[1]


def _below(u_RV: Tensor, top_R: Tensor, outer: float) -> Tensor:
    """z minus the largest z of its row. Overwrites u_RV."""
    u_RV.sub_(top_R.unsqueeze(1))
    return u_RV.mul_(outer) if outer != 1.0 else u_RV


def cross_entropy_chunk_plain_(
    logits_CV: Tensor,
    labels_C: Tensor,
    outs_KC: Tensor,
    ignore_index: int,
    inner: float,
    outer: float,
    scale: Tensor,
    smoothing: float,
    z_loss: float,
    best: bool,
    grad: bool,
) -> None:
    """`hfpatch::cross_entropy_chunk_` in plain torch, in float32 (float64 for float64 logits)."""
    for rows, u_RV, ignored_R, labels_R1 in _tiles(logits_CV, labels_C, ignore_index, inner):
        # [Step 1] Compute the largest u of each row, and lse relative to it.
        top_R = u_RV.amax(1)
        top_R.masked_fill_(top_R.isinf(), 0.0)  # a row of -inf has an lse of -inf
        below_RV = _below(u_RV.clone(), top_R, outer)
        e_RV = below_RV.exp()
        total_R = e_RV.sum(1)
        log_R = total_R.log()
        lse_R = outer * top_R + log_R
        # [Step 2] Compute the loss, with label smoothing and z loss.
        nll_R = outer * (top_R - u_RV.gather(1, labels_R1).squeeze(1)) + log_R
        loss_R = (1.0 - smoothing) * nll_R + z_loss * lse_R.square()
        if smoothing:
            loss_R += smoothing * (lse_R - outer * u_RV.mean(1))
        # [Step 3] Add the outputs that were requested. Ignored rows get zeros.
        outs = [loss_R, top_R, log_R]
        if len(outs_KC) > 4:
            below_RV.masked_fill_(e_RV == 0.0, 0.0)  # a word ruled out: 0 * -inf would be NaN
            entropy_R = log_R - below_RV.mul_(e_RV).sum(1) / total_R
            square_R = e_RV.square_().sum(1) / total_R.square()
            outs += [entropy_R, outer * u_RV.mean(1), square_R]
        if best:
            outs.append(u_RV.argmax(1).to(u_RV.dtype))
        outs_KC[:, rows] = torch.stack(outs).masked_fill_(ignored_R, 0.0)
    # [Step 4] Overwrite the logits with the gradient of the loss.
    if grad:
        factors_KC = loss_factors(outs_KC, scale, outer, smoothing, z_loss, logits_CV.shape[1])
        cross_entropy_chunk_bwd_plain_(logits_CV, labels_C, factors_KC, ignore_index, inner, outer)


def loss_factors(
    outs_KC: Tensor, scale: Tensor, outer: float, smoothing: float, z_loss: float, vocab_size: int
) -> Tensor:
    """The factors_KC of the loss's gradient."""
    top_C, log_C = lse_2C = outs_KC[1:3]
    scale_C = scale.expand_as(top_C)
    p_C = scale_C + scale_C * (2.0 * z_loss * whole_lse(lse_2C, outer))
    factors = [top_C, p_C * log_C.neg().exp(), scale_C * (1.0 - smoothing)]
    if smoothing:
        factors.append(scale_C * (smoothing / vocab_size))
    return torch.stack(factors)


def cross_entropy_chunk_bwd_plain_(
    logits_CV: Tensor,
    labels_C: Tensor,
    factors_KC: Tensor,
    ignore_index: int,
    inner: float,
    outer: float,
) -> None:
    """`hfpatch::cross_entropy_chunk_bwd_` in plain torch."""
    for rows, u_RV, ignored_R, labels_R1 in _tiles(logits_CV, labels_C, ignore_index, inner):
        logits_RV = logits_CV[rows]
        top_R = factors_KC[0, rows]
        p_R1, y_R1, *others = factors_KC[1:, rows].unsqueeze(-1)
        if inner:  # 1 - tanh^2 without the cancellation where tanh is near 1
            slope_RV = logits_RV.to(u_RV.dtype).mul(inner)
            slope_RV.cosh_().square_().reciprocal_().mul_(inner)
        below_RV = _below(u_RV, top_R, outer)
        if len(others) > 1:
            _, entropy_R1, h_R1, q_R1 = others
            d_RV = below_RV.exp()
            factor_RV = below_RV.add_(entropy_R1).mul_(h_R1).add_(p_R1).addcmul_(d_RV, q_R1)
            d_RV.mul_(factor_RV.masked_fill_(d_RV == 0.0, 0.0))
        else:
            d_RV = below_RV.exp_().mul_(p_R1)
        if others:
            d_RV.sub_(others[0])
        d_RV.scatter_add_(1, labels_R1, -y_R1)
        if inner:
            d_RV.mul_(slope_RV)
        if outer != 1.0:
            d_RV.mul_(outer)
        logits_RV.copy_(d_RV.masked_fill_(ignored_R.unsqueeze(1), 0.0))


def _scale(x: Tensor, factor: Tensor) -> None:
    # In float32: a 16-bit x would round the factor first.
    for part in x.view(-1).split(TILE):
        part.copy_(part.to(factor.dtype) * factor)


# With `grad` the logits become their gradient. inner 0 means no soft cap; scale is a 0-d tensor on
# the device.
cross_entropy_chunk_ = define(
    "cross_entropy_chunk_(Tensor(a!) logits, Tensor labels, Tensor(b!) outs, int ignore_index, "
    "float inner, float outer, Tensor scale, float smoothing, float z_loss, bool best, bool grad) "
    "-> ()",
    cross_entropy_chunk_plain_,
    "cross_entropy.cross_entropy_fwd",
)
cross_entropy_chunk_bwd_ = define(
    "cross_entropy_chunk_bwd_(Tensor(a!) logits, Tensor labels, Tensor factors, int ignore_index, "
    "float inner, float outer) -> ()",
    cross_entropy_chunk_bwd_plain_,
    "cross_entropy.cross_entropy_bwd",
)
# x *= factor, for a contiguous x. The kernel reads the factor on the device, and does not touch x if
# the factor is 1.
scale_ = define(
    "scale_(Tensor(a!) x, Tensor factor) -> ()",
    _scale,
    "scale.scale_",
)
