"""LSH attention of attention.py, faster: the scores of pairs that share a bucket, and no others.

The result is that of attention.lsh_attention_reference, up to rounding, for one hash function and
pairs="all". attention.lsh_attention calls lsh_attention_fast, at the end, which chooses between
lsh_attention_blocks and, on a GPU, attention_flex.py. On a CPU this file needs torch alone.

Notation:
    B batch   H heads   L positions   e head size   hq, hk hash buckets of queries and keys
    sequence   one head of one text: there are B·H sequences of L positions
    cell       the queries and the keys of one sequence that share a bucket
    extra key  one key that stands for all keys outside a query's cell
    row        a position, numbered over all sequences from 0 to N - 1, N = B·H·L

The docstrings go on with this example, one sequence of eight positions, whose last key is padding:

    position               0  1  2  3  4  5  6  7
    bucket of the query    4  7  4  9  7  4  9  7
    bucket of the key      7  7  4  4  9  9  4  7

    bucket   queries   keys
    4        0 2 5     2 3 6
    7        1 4 7     0 1
    9        3 6       4 5

1. Number the cells (number_cells).
2. Let each query attend to one more key, which stands for all keys outside its cell
   (find_extra_key). With fill="zero" these have the score 0, so together they weigh
   c · exp(0) = exp(ln c): the extra key has the score ln c, and the mean of their values. With
   fill="mask" they have no weight, but a query attends to the key at its own position. The extra
   key is that key, where it is in another cell.
3. List the rows of each cell (group_cells), and attend within cells (attend): 9 + 6 + 4 of the 64
   scores, and those of the extra keys.

Step 2 is exact. Here a query has the score ln 3 with the only key of its cell, two keys lie
outside, and the values are 1, 2, 3. Both results are 1.6:

    formula              weights exp(ln 3), exp(0), exp(0) = 3, 1, 1    (3·1 + 1·2 + 1·3) / 5
    cell and extra key   weights exp(ln 3), exp(ln 2) = 3, 2            (3·1 + 2·2.5) / 5
"""

import functools
import importlib.util
import math
import shutil
import warnings

import torch
import torch.nn.functional as F

MIN_FLEX_HEAD = 16  # the narrowest head that FlexAttention compiles for a GPU
# Queries of a cell up to which attend is taken, the formula, not attend_large, PyTorch's kernel. It
# changes the speed, and the result by rounding alone
MAX_FORMULA_CELL = 64
NO_SCORE = -1e30  # score of an extra key that does not exist; finite, since -inf · 0 is NaN


def lsh_attention_blocks(q, k, v, hq, hk, fill, key_mask):
    """Return lsh_attention without an (L, L) matrix, in float32 or float64. A loop would do:

        for each cell, and each query of the cell:
            scores = q · k / √e for the keys of the cell, then the score of the extra key
            values = v for the keys of the cell, then the value of the extra key
            output = softmax(scores) · values

    There may be thousands of cells. So put cells of similar size in one group, and attend group by
    group. The memory grows with L, not L², even if all positions share a bucket.

    Do not allow TF32 on a GPU. It rounds the factors of a product, and the score of an extra key is
    one in attend_large: all keys outside would get another weight.

    Args:
        q, k, v: float (B, H, L, e).
        hq, hk: int64 (B, H, L), hash buckets.
        fill: "zero" or "mask".
        key_mask: bool (B, L), False = padding.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)  # ln c needs more than 8 bits
    q = q.to(dtype)
    k = k.to(dtype)
    v = v.to(dtype)
    cell_q, cell_k = number_cells(hq, hk, key_mask)  # (B, H, L) each
    extra_score, extra_value = find_extra_key(q, k, v, cell_q, cell_k, key_mask, fill)
    rows_q, rows_k = group_cells(cell_q.flatten(), cell_k.flatten())

    N = cell_q.numel()
    outputs = []  # (G, x, e), one for each group
    extra_weights = []  # (G, x, 1)
    groups = zip(
        gather_groups(q / math.sqrt(q.shape[3]), rows_q),  # (G, x, e)
        gather_groups(k, rows_k),  # (G, y, e)
        gather_groups(v, rows_k),  # (G, y, e)
        gather_groups(extra_score, rows_q),  # (G, x, 1)
        [(rows != N).unsqueeze(1) for rows in rows_k])  # (G, 1, y), False = padding
    for query, key, value, score, is_key in groups:
        is_small = query.shape[1] <= MAX_FORMULA_CELL
        attend_group = attend if is_small else attend_large
        output, extra_weight = attend_group(query, key, value, score, is_key)
        outputs.append(output)
        extra_weights.append(extra_weight)
    inside = scatter_groups(outputs, rows_q, N)  # (N, e)
    extra_weight = scatter_groups(extra_weights, rows_q, N)  # (N, 1)
    return inside.view_as(v) + extra_weight.view_as(extra_score) * extra_value


# Cells, and the extra key of each query


def number_cells(hq, hk, key_mask):
    """Return the number of each query's and of each key's cell, int64 (B, H, L) each.

    Sort the 2L buckets of a sequence, those of its queries and of its keys together. The number of
    a cell is the place where its bucket first occurs:

        buckets, sorted     4  4  4  4  4  4    7  7  7  7  7  7    9  9  9  9
        place               0  1  2  3  4  5    6  7  8  9 10 11   12 13 14 15

        cell of the query   0  6  0 12  6  0 12  6
        cell of the key     6  6  0  0 12 12  0 16

    A second sequence would have numbers from 2L = 16 on. So all numbers are below 2N; keys that are
    padding get 2N, which no query has. (torch.unique would give numbers without gaps. But how many
    there are depends on the data, so the host would wait for a GPU.)

    Args:
        hq, hk: int64 (B, H, L), hash buckets.
        key_mask: bool (B, L), False = padding.
    """
    B, H, L = hq.shape
    N = B * H * L
    buckets = torch.cat([hq, hk], 2)  # (B, H, 2L)
    in_order = buckets.sort().values
    place = torch.searchsorted(in_order, buckets)  # of the first occurrence, 0 to 2L - 1
    start = torch.arange(0, 2 * N, 2 * L, device=hq.device)  # sequence s has numbers from s·2L on
    cell = start.view(B, H, 1) + place  # (B, H, 2L)
    cell_q, cell_k = cell.chunk(2, 2)
    is_padding = ~key_mask.unsqueeze(1)  # (B, 1, L)
    return cell_q, cell_k.masked_fill(is_padding, 2 * N)


def find_extra_key(q, k, v, cell_q, cell_k, key_mask, fill):
    """Return the score (B, H, L, 1) and value (B, H, L, e) of each query's extra key.

    In the example query 0 has four keys outside its cell, those at 0, 1, 4 and 5. With fill="zero"
    its extra key has the score ln 4 and the mean of their values. With fill="mask" the extra key is
    that at 0. A query without an extra key gets the score NO_SCORE and the value 0.

    Args:
        q, k, v: float32 or float64 (B, H, L, e).
        cell_q, cell_k: from number_cells.
        key_mask: bool (B, L), False = padding.
    """
    is_key = key_mask[:, None, :, None]  # (B, 1, L, 1)
    if fill == "zero":
        count, mean = average_outside(v, is_key, cell_q, cell_k)
        score = count.log().clamp(min=NO_SCORE)
        return score, mean
    if fill == "mask":
        product = (q * k).sum(3, keepdim=True)  # (B, H, L, 1)
        score = product / math.sqrt(q.shape[3])
        is_outside = cell_q != cell_k  # (B, H, L)
        is_extra = is_key & is_outside.unsqueeze(3)
        score = score.masked_fill(~is_extra, NO_SCORE)
        value = v.masked_fill(~is_extra, 0.0)
        return score, value
    raise NotImplementedError(fill)


def average_outside(v, is_key, cell_q, cell_k):
    """Return how many keys are outside each query's cell, (B, H, L, 1), and their mean value."""
    v = v.masked_fill(~is_key, 0.0)
    count = sum_outside(is_key.to(v).expand_as(v[..., :1]), cell_q, cell_k)
    total = sum_outside(v, cell_q, cell_k)
    return count, total / count.clamp(min=1)


def sum_outside(x, cell_q, cell_k):
    """Return for each query the sum of x, (B, H, L, width), over the keys outside its cell.

    It is the sum of the sequence minus that of the cell. The difference loses digits where nearly
    all keys are in the cell and their values are far from 0.
    """
    rows = x.flatten(0, 2)
    N, width = rows.shape
    cell_sums = rows.new_zeros(2 * N + 1, width)  # of each cell number
    cell_sums.index_add_(0, cell_k.flatten(), rows)
    inside = cell_sums.index_select(0, cell_q.flatten()).view_as(x)
    return x.sum(2, keepdim=True) - inside


# The rows of each cell, in groups


def group_cells(cell_q, cell_k):
    """Return the rows of queries and of keys in each cell, cells of similar size in one group.

    Row N, padding, fills the cells of a group up to one size. In the example N = 8, and all cells
    are in one group:

        cell   queries   keys
        0      0 2 5     2 3 6
        6      1 4 7     0 1 8
        12     3 6 8     4 5 8

    Args:
        cell_q, cell_k: int64 (N,), the cell of each query and of each key.

    Returns:
        rows_q, list of int64 (G, x), and rows_k, list of int64 (G, y), one of each for a group.
    """
    N = len(cell_q)
    # Shapes depend on the sizes of the cells: here, and only here, the host waits for a GPU
    host_q, host_k = torch.stack([cell_q, cell_k]).cpu()
    count_q = host_q.bincount(minlength=2 * N + 1)  # how many queries each cell has
    count_k = host_k.bincount(minlength=2 * N + 1)
    sorted_q, order_q = cell_q.sort()
    sorted_k, order_k = cell_k.sort()
    rows_q = []
    rows_k = []
    for cells in group_by_size(count_q, count_k):  # (G,)
        max_q = count_q[cells].max().item()
        max_k = count_k[cells].max().item()
        # subtle: non_blocking, else the host would wait once more for each group
        cells = cells.to(cell_q.device, non_blocking=True)
        rows_q.append(list_rows(sorted_q, order_q, cells, max_q))  # (G, x)
        rows_k.append(list_rows(sorted_k, order_k, cells, max_k))  # (G, y)
    return rows_q, rows_k


def group_by_size(count_q, count_k):
    """Return the numbers of the cells that have queries, a list of int64 (G,), one for each group.

    The size of a cell is the number of its queries or of its keys, whichever is larger. Sizes 1 to
    4 are one group, then 5 to 6, 7 to 9, 10 to 13, ...: beyond 4 the largest size of a group is at
    most 1.5 times the smallest, which bounds the padding.

    Args:
        count_q, count_k: int64 (2N + 1,), how many queries and how many keys each cell has.
    """
    cells = count_q.nonzero().squeeze(1)
    size = torch.maximum(count_q, count_k)[cells]
    bounds = 4 * 1.5 ** torch.arange(64)  # 4, 6, 9, 13.5, ...
    group_of_cell = torch.bucketize(size.float(), bounds)
    groups = []
    for number in group_of_cell.unique():
        groups.append(cells[group_of_cell == number])
    return groups


def list_rows(sorted_cell, order, cells, size):
    """Return the rows of G cells, int64 (G, size). Behind the end of a cell is row N.

    The keys of the example, N = 8, of cells 0, 6 and 12:

        sorted_cell   0 0 0   6 6     12 12     16
        order         2 3 6   0 1      4  5      7
        rows          2 3 6   0 1 8    4  5 8

    Args:
        sorted_cell, order: int64 (N,), the cells of all rows, sorted, and the row of each.
        cells: int64 (G,), numbers of cells.
        size: int, how many rows the largest of them has.
    """
    N = len(order)
    first = torch.searchsorted(sorted_cell, cells)  # (G,), where the rows of each cell begin
    end = torch.searchsorted(sorted_cell, cells, right=True)  # and where those of the next begin
    index = first.unsqueeze(1) + torch.arange(size, device=cells.device)  # (G, size)
    rows = order[index.clamp(max=N - 1)]
    return rows.masked_fill(index >= end.unsqueeze(1), N)


def gather_groups(x, rows):
    """Return the vectors of the rows of each group, a list of float (G, size, width).

    One gather serves all groups, since the backward pass of each gather fills a tensor as large as
    x. For groups (4, 2) and (1, 7) it returns (15, width), which is split into 8 and 7 rows, and
    shaped as (4, 2, width) and (1, 7, width).

    Args:
        x: float (B, H, L, width). Padding, row N, gets zeros.
        rows: rows_q or rows_k of group_cells, a list of int64 (G, size).
    """
    table = F.pad(x.flatten(0, 2), (0, 0, 0, 1))  # (N + 1, width)
    all_rows = torch.cat([group.flatten() for group in rows])
    num_rows = [group.numel() for group in rows]
    parts = table.index_select(0, all_rows).split(num_rows)
    groups = []
    for part, group in zip(parts, rows):
        groups.append(part.unflatten(0, group.shape))
    return groups


def scatter_groups(groups, rows, N):
    """Return the vectors of all groups in the order of their rows, (N, width).

    Args:
        groups: list of float (G, x, width).
        rows: rows_q of group_cells, a list of int64 (G, x).
        N: int. Padding writes to row N, which is cut off.
    """
    all_rows = torch.cat([group.flatten() for group in rows])
    vectors = torch.cat([group.flatten(0, 1) for group in groups])
    table = vectors.new_zeros(N + 1, vectors.shape[1])
    table.index_copy_(0, all_rows, vectors)
    return table[:N]


# Attention within the cells of a group


def attend(q, k, v, extra_score, is_key):
    """Return the weighted sum of v inside each cell, (G, x, e), and the extra key's weight.

    The weights of a query, those of its cell's keys and that of its extra key, add up to 1.

    Args:
        q: float (G, x, e), the queries of G cells, divided by √e.
        k, v: float (G, y, e), the keys and values of these cells.
        extra_score: float (G, x, 1), the score of each query's extra key.
        is_key: bool (G, 1, y), False = padding.

    Returns:
        float (G, x, e) and (G, x, 1).
    """
    scores = q @ k.transpose(1, 2)  # (G, x, y)
    scores = scores.masked_fill(~is_key, -torch.inf)
    scores = torch.cat([scores, extra_score], 2)  # (G, x, y + 1)
    weights = scores.softmax(2)
    inside_weights, extra_weight = weights.split([k.shape[1], 1], 2)
    return inside_weights @ v, extra_weight


def attend_large(q, k, v, extra_score, is_key):
    """Return what attend returns by PyTorch's kernel, which holds no matrix of scores.

    The kernel takes no scores, and returns no weights. So the extra key is one more row of k and v.
    One more column gives its score and its weight:

                    query              key      value
        in a cell   (q, extra_score)   (k, 0)   (v, 0)
        extra key                      (0, 1)   (0, 1)

    The product of a query and the extra key is extra_score. The extra key alone has a 1 in the last
    column of its value, so there the weighted sum of the values is its weight.

    Args:
        q, k, v, extra_score, is_key: as in attend.
    """
    e = q.shape[2]
    width = e + 1
    if q.is_cuda:  # there the kernel wants a multiple of 4: more columns of zeros
        width += -width % 4
    extra_row = q.new_zeros(k.shape[1] + 1, width)
    extra_row[-1, e] = 1
    q = F.pad(torch.cat([q, extra_score], 2), (0, width - e - 1))  # (G, x, width)
    k = F.pad(k, (0, width - e, 0, 1)) + extra_row  # (G, y + 1, width)
    v = F.pad(v, (0, width - e, 0, 1)) + extra_row
    is_key = F.pad(is_key, (0, 1), value=True)  # (G, 1, y + 1)
    out = F.scaled_dot_product_attention(  # it wants a dimension of heads
        q.unsqueeze(1),
        k.unsqueeze(1),
        v.unsqueeze(1),
        attn_mask=is_key.unsqueeze(1),
        scale=1.0)
    out = out.squeeze(1)
    return out[:, :, :e], out[:, :, e:e + 1]


# Which form is taken


# torch.compile leaves it out, as its shapes depend on the data: each would be compiled anew. This
# line takes a second when the file is imported
@torch.compiler.disable
def lsh_attention_fast(q, k, v, hq, hk, fill, key_mask, impl):
    """Return attention.lsh_attention by blocks or by FlexAttention.

    Args:
        q, k, v: float (B, H, L, e).
        hq, hk: int64 (B, H, 1, L), hash buckets.
        fill: "zero" or "mask".
        key_mask: bool (B, L), False = padding, or None.
        impl: "blocks", "flex", or "auto": the faster of these on the device of q.
    """
    if impl == "auto":
        impl = choose_fast_impl(q)
    if impl == "blocks":
        attend_within_buckets = lsh_attention_blocks
    elif impl == "flex":
        from attention_flex import lsh_attention_flex as attend_within_buckets
    else:
        raise NotImplementedError(impl)
    if key_mask is None:
        key_mask = torch.ones_like(hq[:, 0, 0], dtype=torch.bool)  # (B, L)
    with torch.autocast(q.device.type, enabled=False):
        out = attend_within_buckets(q, k, v, hq.squeeze(2), hk.squeeze(2), fill, key_mask)
    return out.to(q.dtype)


def choose_fast_impl(q):
    """Return "flex" in half precision on a GPU, if it can run there, and else "blocks"."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)  # in float32 FlexAttention is slower
    if q.is_cuda and is_half and q.shape[3] >= MIN_FLEX_HEAD and has_flex():
        return "flex"
    return "blocks"


@functools.cache
def has_flex():
    """Return whether attention_flex.py and a C compiler are here; warn once of what is missing."""
    if importlib.util.find_spec("attention_flex") is None:
        missing = "attention_flex.py beside attention.py"
    elif shutil.which("gcc") is None and shutil.which("clang") is None:
        missing = "C compiler for FlexAttention"
    else:
        return True
    warnings.warn(f"LSH attention: found no {missing}. It runs bucket by bucket, which is slower "
                  "on a GPU.")
    return False
