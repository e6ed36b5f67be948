/* A mixture of experts, as defined by engine/models/experts.py:
 *
 *     x ─▶ router ─▶ top k ─▶ (token, expert) pairs ─▶ sorted by expert ─▶ gate, up ─▶ down ─▶ weighted sum of each token's
 *
 * A token's pairs are summed in the order its router gave them, so other tokens of a batch change no sum. Of experts
 * with equal scores the first is chosen.
 */
#include "experts.h"

#include <math.h>

#define MOST_EXPERTS 1024 /* as in engine/models/native_decoder.py */

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static int best_of(const float *wanted, int count)
{
    int best = 0;
    for (int i = 1; i < count; i++)
        if (wanted[i] > wanted[best])
            best = i;
    return best;
}

/* Keep the groups of experts whose two best scores have the largest sums (DeepSeek-V3, arXiv:2412.19437, 2.1.2). */
static void close_groups(const Experts *experts, float *wanted)
{
    int size = experts->num_experts / experts->num_groups;
    float sums[MOST_EXPERTS];
    for (int group = 0; group < experts->num_groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = group * size; i < (group + 1) * size; i++) {
            float larger = wanted[i] > first ? wanted[i] : first, smaller = wanted[i] > first ? first : wanted[i];
            first = larger;
            second = smaller > second ? smaller : second;
        }
        sums[group] = size > 1 ? first + second : first;
    }
    bool is_open[MOST_EXPERTS] = {false};
    for (int i = 0; i < experts->groups_per_token; i++) {
        int best = best_of(sums, experts->num_groups);
        is_open[best] = true;
        sums[best] = -INFINITY;
    }
    for (int i = 0; i < experts->num_experts; i++)
        if (!is_open[i / size])
            wanted[i] = -INFINITY;
}

/* Choose a token's experts by its logits, which become their scores. */
static void route(const Experts *experts, float *scores, int32_t *chosen, float *weights)
{
    int count = experts->num_experts;
    float wanted[MOST_EXPERTS], total = 0;
    if (experts->is_sigmoid)
        for (int i = 0; i < count; i++)
            scores[i] = sigmoid(scores[i]);
    else {
        float most = scores[best_of(scores, count)];
        for (int i = 0; i < count; i++)
            total += scores[i] = expf(scores[i] - most);
        for (int i = 0; i < count; i++)
            scores[i] /= total;
    }
    for (int i = 0; i < count; i++)
        wanted[i] = experts->correction ? scores[i] + experts->correction[i] : scores[i];
    if (experts->num_groups > 1)
        close_groups(experts, wanted);
    total = 0;
    for (int i = 0; i < experts->per_token; i++) {
        chosen[i] = best_of(wanted, count);
        wanted[chosen[i]] = -INFINITY;
        total += weights[i] = scores[chosen[i]];
    }
    float factor = experts->is_sigmoid ? experts->scaling : 1;
    if (experts->renormalizes)
        factor /= experts->is_sigmoid ? total + 1e-20f : total;
    for (int i = 0; i < experts->per_token; i++)
        weights[i] *= factor;
}

static void route_phase(ThreadTeam *team, const Experts *experts, int rows, ExpertBuffers *buffers)
{
    for (int row; (row = team_take(team, rows)) < rows;) {
        size_t at = (size_t)row * experts->per_token;
        route(experts, buffers->logits + (size_t)row * experts->num_experts, buffers->chosen + at,
              buffers->weights + at);
    }
    team_barrier(team);
}

/* Sort the pairs by expert, keeping the order within each expert. */
static void sort_pairs(const Experts *experts, int pairs, ExpertBuffers *buffers)
{
    int32_t *next = buffers->next;
    memset(next, 0, experts->num_experts * sizeof *next);
    for (int pair = 0; pair < pairs; pair++)
        next[buffers->chosen[pair]]++;
    int used = 0, begin = 0;
    for (int expert = 0; expert < experts->num_experts; expert++) {
        int count = next[expert];
        next[expert] = begin;
        if (!count)
            continue;
        buffers->which[used] = expert;
        buffers->first[used++] = begin;
        begin += count;
    }
    buffers->first[used] = begin;
    *buffers->num_used = used;
    for (int pair = 0; pair < pairs; pair++)
        buffers->places[pair] = next[buffers->chosen[pair]]++;
}

/* One thread sorts. */
static void sort_phase(ThreadTeam *team, const Experts *experts, int pairs, ExpertBuffers *buffers)
{
    while (team_take(team, 1) < 1)
        sort_pairs(experts, pairs, buffers);
    team_barrier(team);
}

static void gather_phase(ThreadTeam *team, const Experts *experts, const elem *normed, int hidden, int rows,
                         ExpertBuffers *buffers)
{
    for (int row; (row = team_take(team, rows)) < rows;)
        for (int i = 0; i < experts->per_token; i++) {
            size_t place = buffers->places[(size_t)row * experts->per_token + i];
            memcpy(buffers->gathered + place * hidden, normed + (size_t)row * hidden, hidden * sizeof(elem));
        }
    team_barrier(team);
}

/* The sum begins with the output of the shared MLP. */
static void shared_phases(ThreadTeam *team, const Experts *experts, const elem *normed, int hidden, int rows,
                          ExpertBuffers *buffers)
{
    NAME(linear)(team, &experts->shared_gate_up, normed, hidden, rows, SWIGLU, buffers->shared_inner,
                 experts->shared_intermediate);
    team_barrier(team);
    NAME(linear)(team, &experts->shared_down, buffers->shared_inner, experts->shared_intermediate, rows, TO_FLOATS,
                 buffers->sum, hidden);
    team_barrier(team);
}

static void sum_phase(ThreadTeam *team, const Experts *experts, int hidden, int rows, ExpertBuffers *buffers)
{
    bool has_shared = experts->shared_gate_up.outputs > 0;
    for (int row; (row = team_take(team, rows)) < rows;) {
        const int32_t *places = buffers->places + (size_t)row * experts->per_token;
        const float *weights = buffers->weights + (size_t)row * experts->per_token;
        float *to = buffers->sum + (size_t)row * hidden;
        for (int i = 0; i < hidden; i += LANES) {
            vf total = vset(0);
            for (int j = 0; j < experts->per_token; j++)
                total += vload(buffers->outputs + (size_t)places[j] * hidden + i) * weights[j];
            vstore(to + i, has_shared ? vload(to + i) + total : total);
        }
    }
    team_barrier(team);
}

void NAME(experts)(ThreadTeam *team, const Experts *experts, const elem *normed, int hidden, int rows,
                   ExpertBuffers *buffers)
{
    NAME(linear)(team, &experts->router, normed, hidden, rows, TO_FLOATS, buffers->logits, experts->num_experts);
    team_barrier(team);
    route_phase(team, experts, rows, buffers);
    sort_phase(team, experts, rows * experts->per_token, buffers);
    gather_phase(team, experts, normed, hidden, rows, buffers);
    Sorted sorted = {buffers->which, buffers->first, *buffers->num_used};
    NAME(sorted_linears)(team, experts->gate_up, &sorted, buffers->gathered, hidden,
                         experts->is_clamped ? CLAMPED_SWIGLU : SWIGLU, buffers->inner, experts->intermediate);
    team_barrier(team);
    NAME(sorted_linears)(team, experts->down, &sorted, buffers->inner, experts->intermediate, TO_FLOATS,
                         buffers->outputs, hidden);
    team_barrier(team);
    if (experts->shared_gate_up.outputs > 0)
        shared_phases(team, experts, normed, hidden, rows, buffers);
    sum_phase(team, experts, hidden, rows, buffers);
}

#undef MOST_EXPERTS
