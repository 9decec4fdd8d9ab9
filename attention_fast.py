"""LSH attention of attention.py, faster: the scores of pairs that share a bucket, and no others.

The result is that of attention.lsh_attention_reference, up to rounding, for one hash function and
pairs="all". attention.lsh_attention calls this file, which needs torch alone. attention_flex.py has
another form for a GPU.

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
3. List the rows of each cell (group_cells), and attend within cells (Tables): 9 + 6 + 4 of the 64
   scores, and those of the extra keys.

Step 2 is exact. Here a query has the score ln 3 with the only key of its cell, two keys lie
outside, and the values are 1, 2, 3. Both results are 1.6:

    formula              weights exp(ln 3), exp(0), exp(0) = 3, 1, 1    (3·1 + 1·2 + 1·3) / 5
    cell and extra key   weights exp(ln 3), exp(ln 2) = 3, 2            (3·1 + 2·2.5) / 5
"""

import math

import torch
import torch.nn.functional as F

# Queries of a cell up to which attend is the formula, not PyTorch's kernel. It changes the speed,
# and the result by rounding alone
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

    tables = Tables(q, k, v, extra_score)
    inside, extra_weight = tables.attend(rows_q, rows_k)  # (N, e) and (N, 1)
    inside = inside.view_as(v)
    extra_weight = extra_weight.view_as(extra_score)
    return inside + extra_weight * extra_value


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
    product = (q * k).sum(3, keepdim=True)  # (B, H, L, 1)
    score = product / math.sqrt(q.shape[3])
    is_outside = cell_q != cell_k  # (B, H, L)
    is_extra = is_key & is_outside.unsqueeze(3)
    score = score.masked_fill(~is_extra, NO_SCORE)
    value = v.masked_fill(~is_extra, 0.0)
    return score, value


def average_outside(v, is_key, cell_q, cell_k):
    """Return how many keys are outside each query's cell, (B, H, L, 1), and their mean value.

    A sum outside is the sum of the sequence minus that of the cell. The difference loses digits
    where nearly all keys are in the cell and their values are far from 0.
    """
    v = F.pad(v, (0, 1), value=1.0)  # (B, H, L, e + 1), the last column counts keys
    v = v.masked_fill(~is_key, 0.0)
    rows = v.flatten(0, 2)  # (N, e + 1)
    N, width = rows.shape
    cell_sums = rows.new_zeros(2 * N + 1, width)  # of each cell number
    cell_sums.index_add_(0, cell_k.flatten(), rows)
    inside = cell_sums.index_select(0, cell_q.flatten())  # (N, e + 1)
    sequence_sums = v.sum(2, keepdim=True)  # (B, H, 1, e + 1)
    outside = sequence_sums - inside.view_as(v)
    count = outside[..., -1:].detach()
    total = outside[..., :-1]
    return count, total / count.clamp(min=1)


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
    cell = torch.stack([cell_q, cell_k])  # (2, N)
    # how many queries and keys each cell has; for bincount the host would wait
    count = cell.new_zeros(2, 2 * N + 1)
    count.scatter_add_(1, cell, torch.ones_like(cell))
    by_cell = cell.argsort(1)  # (2, N): the rows of cell 0, of cell 1, ...
    first = count.cumsum(1) - count  # where the rows of each cell begin in by_cell

    # Shapes depend on the counts, so the host needs them: here, and only here, it waits for a GPU
    host_count = count.cpu()
    rows_q = []
    rows_k = []
    for group in group_by_size(host_count):  # (G,)
        max_q, max_k = host_count[:, group].amax(1).tolist()
        # subtle: non_blocking, else the host would wait once more for each group
        group = group.to(cell.device, non_blocking=True)
        queries = pad_cells(by_cell[0], first[0, group], count[0, group], max_q)  # (G, x)
        keys = pad_cells(by_cell[1], first[1, group], count[1, group], max_k)  # (G, y)
        rows_q.append(queries)
        rows_k.append(keys)
    return rows_q, rows_k


def group_by_size(count):
    """Return the numbers of the cells that have queries, a list of int64 (G,), one for each group.

    The size of a cell is the number of its queries or of its keys, whichever is larger. Sizes 1 to
    4 are one group, then 5 to 6, 7 to 9, 10 to 13, ...: beyond 4 the largest size of a group is at
    most 1.5 times the smallest, which bounds the padding.

    Args:
        count: int64 (2, 2N + 1), how many queries and keys each cell has.
    """
    cells = count[0].nonzero().squeeze(1)
    size = count[:, cells].amax(0)
    bounds = 4 * 1.5 ** torch.arange(64)  # 4, 6, 9, 13.5, ...
    group_of_cell = torch.bucketize(size.float(), bounds)
    groups = []
    for number in group_of_cell.unique():
        groups.append(cells[group_of_cell == number])
    return groups


def pad_cells(by_cell, first, count, size):
    """Return the rows of G cells, int64 (G, size). Behind the end of a cell is row N.

    The keys of the example, N = 8, of cells 0, 6 and 12:

        by_cell   2 3 6   0 1     4 5     7
        first     0       3       5
        count     3       2       2
        rows      2 3 6   0 1 8   4 5 8

    Args:
        by_cell: int64 (N,), the rows sorted by cell.
        first, count: int64 (G,), where the rows of each cell begin, and how many it has.
        size: int, the largest count.
    """
    N = len(by_cell)
    place = torch.arange(size, device=by_cell.device)  # (size,)
    index = first.unsqueeze(1) + place  # (G, size)
    rows = by_cell[index.clamp(max=N - 1)]
    is_behind = place >= count.unsqueeze(1)  # there are the rows of the next cell
    return rows.masked_fill(is_behind, N)


# Attention within the cells


class Tables:
    """Queries, keys and values, one row for each position, and two more rows.

    The extra key stands in every cell, and has one row for all queries. But its score differs from
    query to query. So each query carries it in a column more, where the extra key alone has a 1:
    their product is the score. Its value has a 1 there too, so this column of the output is the
    weight of the extra key.

        row          query                   key       value
        0 to N - 1   (q / √e, extra_score)   (k, 0)    (v, 0)
        N            (0, 0)                  (0, 0)    (0, 0)    padding of group_cells
        N + 1                                (0, 1)    (0, 1)    extra key

    Args:
        q, k, v: float (B, H, L, e).
        extra_score: float (B, H, L, 1).
    """

    def __init__(self, q, k, v, extra_score):
        e = q.shape[3]
        num_zeros = 0
        if q.is_cuda:  # more columns of zeros: there PyTorch's kernel wants a multiple of 4
            num_zeros = 3
        q = torch.cat([q / math.sqrt(e), extra_score], 3)  # (B, H, L, e + 1)
        q = q.flatten(0, 2)  # (N, e + 1)
        k = k.flatten(0, 2)  # (N, e)
        v = v.flatten(0, 2)
        self.q = F.pad(q, (0, num_zeros, 0, 1))  # (N + 1, width)
        self.k = F.pad(k, (0, 1 + num_zeros, 0, 2))  # (N + 2, width)
        self.v = F.pad(v, (0, 1 + num_zeros, 0, 2))
        with torch.no_grad():  # a constant; else autograd would copy the gradient of each table
            self.k[-1, e] = 1
            self.v[-1, e] = 1
        self.num_rows = len(q)  # N
        self.head_size = e

    def attend(self, rows_q, rows_k):
        """Return what each query reads in its cell, (N, e), and the extra key's weight, (N, 1).

        Args:
            rows_q, rows_k: from group_cells.
        """
        N = self.num_rows
        e = self.head_size
        # the last key of each cell is the extra key
        rows_k = [F.pad(rows, (0, 1), value=N + 1) for rows in rows_k]
        q_groups = gather_groups(self.q, rows_q)
        k_groups = gather_groups(self.k, rows_k)
        v_groups = gather_groups(self.v, rows_k)
        outputs = []
        for g in range(len(rows_q)):
            is_key = (rows_k[g] != N).unsqueeze(1)  # (G, 1, y)
            out = attend(q_groups[g], k_groups[g], v_groups[g], is_key)  # (G, x, width)
            outputs.append(out.flatten(0, 1))

        # Put the queries back in order. The padding of all groups writes to row N, which is cut off
        rows = torch.cat([group.flatten() for group in rows_q])
        out = torch.zeros_like(self.q)  # (N + 1, width)
        out.index_copy_(0, rows, torch.cat(outputs))
        return out[:N, :e], out[:N, e:e + 1]


def gather_groups(table, rows):
    """Return the rows of each group: a list of int64 (G, size) to a list of (G, size, width).

    One gather serves all groups, since the backward pass of each gather fills a tensor as large as
    the table. For groups (4, 2) and (1, 7) it returns (15, width), which is split into 8 and 7
    rows, and shaped as (4, 2, width) and (1, 7, width).
    """
    all_rows = torch.cat([group.flatten() for group in rows])
    num_rows = [group.numel() for group in rows]
    parts = table.index_select(0, all_rows).split(num_rows)
    groups = []
    for part, group in zip(parts, rows):
        groups.append(part.unflatten(0, group.shape))
    return groups


def attend(q, k, v, is_key):
    """Return softmax(q kᵀ) v over the keys of each cell, (G, x, width).

    Args:
        q, k, v: float (G, x, width), (G, y, width) and (G, y, width), q divided by √e.
        is_key: bool (G, 1, y), False = padding.
    """
    if q.shape[1] <= MAX_FORMULA_CELL:
        scores = q @ k.transpose(1, 2)  # (G, x, y)
        scores = scores.masked_fill(~is_key, -torch.inf)  # the extra key always has a score
        weights = scores.softmax(2)
        return weights @ v
    # PyTorch's kernel holds no matrix of scores. It wants a dimension of heads
    out = F.scaled_dot_product_attention(
        q.unsqueeze(1),
        k.unsqueeze(1),
        v.unsqueeze(1),
        attn_mask=is_key.unsqueeze(1),
        scale=1.0)
    return out.squeeze(1)
