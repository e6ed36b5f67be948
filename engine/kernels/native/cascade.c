/* Finds rows of a batch that share a prefix, for attention_cascade.c. Compiled once, because it computes no elements.
 *
 *     block tables   row 0   4 9 2 | 7          rows 0, 2 and 3 are a group: they begin with the same pages,
 *                    row 1   5 1               which hold the same KV: a page of several rows is not
 *                    row 2   4 9 2 | 3 6        written any more
 *                    row 3   4 9 2 | 8
 */
#include "attention_sizes.h"
#include "raydix.h"

/* Least shared positions: a group then shares several pieces. Even two rows gain by sharing so many
 * (benchmarks/results/cascade_attention.json), so a group needs no more rows. */
#define LEAST_SHARED PIECE
#define MOST_QUERIES 64    /* of a group and a KV head: their partial results stay in a core's caches */

/* The rows, in the form in which they are compared. */
typedef struct {
    const Batch *batch;
    int page_size, group; /* group: queries of a token that share a KV head */
    int32_t *pages;       /* [num_rows]: whole pages that all queries of the row see; 0: the row joins no group */
    int32_t *alike;       /* [num_rows]: pages that the row has in common with a group's first row */
    int32_t *others;      /* [num_rows]: rows that begin as a group's first row does */
} Rows;

static const int32_t *table_of(const Batch *batch, int row)
{
    return batch->block_table + (size_t)row * batch->table_width;
}

static int tokens_of(const Batch *batch, int row) { return batch->qo_indptr[row + 1] - batch->qo_indptr[row]; }

static int least_pages(const Rows *rows) { return (LEAST_SHARED + rows->page_size - 1) / rows->page_size; }

/* Return the pages of a row that others may share; 0 for a row that joins no group. */
static int pages_to_share(const Rows *rows, int row)
{
    int tokens = tokens_of(rows->batch, row);
    if (tokens * rows->group > FEW_QUERIES)
        return 0;
    int pages = (rows->batch->kv_lens[row] - tokens + 1) / rows->page_size; /* Its first query sees the fewest pages. */
    return pages < least_pages(rows) ? 0 : pages;
}

static int pages_alike(const Rows *rows, int a, int b)
{
    const int32_t *x = table_of(rows->batch, a), *y = table_of(rows->batch, b);
    int most = rows->pages[a] < rows->pages[b] ? rows->pages[a] : rows->pages[b], pages = 0;
    while (pages < most && x[pages] == y[pages])
        pages++;
    return pages;
}

/* List the rows after `first` that share enough with it, those that share most first, and return how many. */
static int list_others(const Rows *rows, int first)
{
    const int32_t *table = table_of(rows->batch, first);
    int least = least_pages(rows), found = 0;
    for (int row = first + 1; row < rows->batch->num_rows; row++) {
        const int32_t *other = table_of(rows->batch, row);
        if (!rows->pages[row] || other[0] != table[0] || other[least - 1] != table[least - 1])
            continue;
        rows->alike[row] = pages_alike(rows, first, row);
        if (rows->alike[row] < least)
            continue;
        int at = found++;
        for (; at > 0 && rows->alike[rows->others[at - 1]] < rows->alike[row]; at--)
            rows->others[at] = rows->others[at - 1];
        rows->others[at] = row;
    }
    return found;
}

/* Return the pages of the prefix whose sharing saves most: more rows have fewer pages in common. */
static int best_pages(const Rows *rows, int found)
{
    int64_t best = 0;
    int pages = 0;
    for (int i = 0; i < found; i++) {
        int64_t saved = (int64_t)(i + 1) * rows->alike[rows->others[i]];
        if (saved > best) {
            best = saved;
            pages = rows->alike[rows->others[i]];
        }
    }
    return pages;
}

/* Divide the rows from `first` on that wait for a group of so many positions into groups of about equal size, and
 * return the number of groups. */
static int form_groups(Rows *rows, int first, int positions, const int32_t *shared, Group *groups,
                       int32_t *members, int listed)
{
    int queries = 0, num_groups = 0, room = 0;
    for (int row = first; row < rows->batch->num_rows; row++)
        if (rows->pages[row] && shared[row] == positions)
            queries += tokens_of(rows->batch, row) * rows->group;
    int parts = (queries + MOST_QUERIES - 1) / MOST_QUERIES;
    for (int row = first; row < rows->batch->num_rows; row++) {
        if (!rows->pages[row] || shared[row] != positions)
            continue;
        if (room <= 0) {
            groups[num_groups++] = (Group){listed, 0, positions};
            room = (queries + parts - 1) / parts;
        }
        room -= tokens_of(rows->batch, row) * rows->group;
        groups[num_groups - 1].rows++;
        members[listed++] = row;
        rows->pages[row] = 0;
    }
    return num_groups;
}

/* Find the batch's groups; return how many. A prefix with more rows than a group takes has several groups.
 * groups, members and shared [num_rows] are filled in; work: [3 * num_rows] numbers. */
EXPORT int32_t raydix_find_groups(const Batch *batch, int32_t page_size, int32_t group, Group *groups,
                                  int32_t *members, int32_t *shared, int32_t *work)
{
    int num = batch->num_rows, num_groups = 0, listed = 0;
    Rows rows = {batch, page_size, group, work, work + num, work + 2 * num};
    for (int row = 0; row < num; row++) {
        shared[row] = 0;
        rows.pages[row] = pages_to_share(&rows, row);
    }
    for (int first = 0; first < num; first++) {
        int found = rows.pages[first] ? list_others(&rows, first) : 0, pages = best_pages(&rows, found);
        if (!pages)
            continue;
        shared[first] = pages * page_size / BLOCK * BLOCK;
        for (int i = 0; i < found && rows.alike[rows.others[i]] >= pages; i++)
            shared[rows.others[i]] = shared[first];
        num_groups += form_groups(&rows, first, shared[first], shared, groups + num_groups, members, listed);
        const Group *last = &groups[num_groups - 1];
        listed = last->first + last->rows;
    }
    return num_groups;
}
