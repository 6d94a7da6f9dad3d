/* The ggml adapter: finds each MoE layer's router and expert tensors in the graph as the scheduler walks it, and makes the
 * calls of hotset.h in between. See hotset_ggml.h for what an engine does with it.
 *
 * How a layer passes through. The scheduler asks about every node in order (ask == true) until one is wanted, computes the stretch up to it, and
 * calls again (ask == false). All asks of a stretch come before any of its nodes is computed. So:
 *
 *   ask  topk                remember it: a new evaluation of this layer begins
 *   stop topk                (if wanted) the scores are valid: hotset_select may write other ids
 *   stop end of weights      ids and weights are valid; remember the weights
 *   ask  first MUL_MAT_ID    nothing of this stretch is computed yet: hotset_admit; then every node that the ids pick from
 *                            (MUL_MAT_ID, ADD_ID, REPEAT of a scale) has its tensor pointed at slots or file, and what it picks is
 *                            waited for
 *   stop MUL_MAT_ID          (where reads are still in flight for a later one) so that the next one is asked about, and waited for, only
 *                            when this one is computed
 *
 * An engine that calls hotset_ggml_rows inside of its MUL_MAT_ID needs neither these waits nor these stops: each expert is waited for where it
 * is used. That it does is seen from its calls: a layer waits by projection until the first of them.
 *
 * Which node ends the weights' chain differs by model. In a layer's first graph every node of the chain is a stop; the last one before
 * the MUL_MAT_ID is the one from then on. If it fails to come, that is an error and it is learned anew.
 */
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS with -std=c11 on glibc */
#endif

#include "hotset_ggml.h"

#include "ggml-backend-impl.h"

#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0 /* macOS reserves nothing anyway */
#endif

/* Three projections with three parts each are the most that a layer can have (gate, up, down; weight, bias, scale). */
#define MAX_BANKS 9

/* The nodes that may end the weights' chain, in the order in which they follow one another. */
static const char * const chain[] = { "ffn_moe_weights", "ffn_moe_weights_softmax", "ffn_moe_weights_norm", "ffn_moe_weights_scaled" };
#define N_CHAIN ((int) (sizeof(chain) / sizeof(chain[0])))
#define CHAIN_NORMALISES(i) ((i) == 1 || (i) == 2)

struct layer {
    uint32_t             block;
    int                  n_banks;
    struct hotset_bank   banks[MAX_BANKS];
    struct ggml_tensor * tensors[MAX_BANKS]; /* the engine's, as far as they are known */
    bool                 companions;         /* there are banks beside the weights */
    int                  chain_end;          /* index into chain; -1: not learned */
    atomic_bool          rows_called;        /* the engine asks for this layer's experts inside of its matmuls */
    struct ggml_tensor * router;             /* the gate: a row of n_embd an expert; NULL until seen */
    /* of the evaluation in progress */
    struct ggml_tensor * input;              /* what the router is applied to */
    struct ggml_tensor * topk;
    struct ggml_tensor * weights;
    int                  chain_last;         /* of the nodes stopped at */
    bool                 normalised;         /* a softmax or norm node was in the chain */
    bool                 admitted;
    bool                 in_slots;
    bool                 in_flight;          /* reads were, when the layer was admitted */
    uint32_t             awaited;            /* bits: projections that are there */
};

struct hotset_ggml {
    struct hotset *                 h;
    struct hotset_ggml_params       params;
    struct ggml_backend_buffer_type buft;
    struct layer *                  layers;
    uint32_t                        n_layers;
    struct layer *                  current; /* whose topk was asked about last */
    /* of the pass in progress */
    int32_t  phase;
    int64_t  position;
    int64_t  pass_tokens;
    bool     select;         /* the scores are wanted */
    bool     drop;
    uint32_t read_ahead;     /* experts of the next layer to guess; 0: none */
    bool     own_wanted, chain_wanted; /* of the last node asked about */
    /* ids as they were before hotset_admit, for an error after it */
    int32_t * ids;
    size_t    n_ids;
    /* the next layer's scores, for guessing; as many as any layer has experts */
    float *   guess;
    uint64_t  stops;
    /* the first error: claimed by who finds it (a thread that computes, perhaps), then written, then shown */
    atomic_flag failing;
    atomic_int  status;
    char        error[512];
};

/* ---- errors ---------------------------------------------------------------------------------------------------------- */

static void fail(struct hotset_ggml * g, int32_t status, const char * format, ...) {
    if (atomic_flag_test_and_set(&g->failing)) {
        return; /* the first one is the cause */
    }
    va_list args;
    va_start(args, format);
    vsnprintf(g->error, sizeof(g->error), format, args);
    va_end(args);
    atomic_store(&g->status, status);
}

/* With the detail that the library has of it. Other threads may be failing as well. */
static void fail_hotset(struct hotset_ggml * g, int32_t status) {
    char detail[sizeof(g->error)];
    hotset_copy_last_error(g->h, detail, sizeof(detail));
    fail(g, status, "%s", detail);
}

/* ---- names and shapes ------------------------------------------------------------------------------------------------ */

/* The layer number of "stem-N", exactly; -1 for any other name ("stem-N (view)", "stem_sum-N"). */
static int layer_of(const char * name, const char * stem) {
    const size_t n = strlen(stem);
    if (strncmp(name, stem, n) != 0 || name[n] != '-' || name[n + 1] < '0' || name[n + 1] > '9') {
        return -1;
    }
    int number = 0;
    for (const char * c = name + n + 1; *c; c++) {
        if (*c < '0' || *c > '9' || number > 100000) {
            return -1;
        }
        number = number * 10 + (*c - '0');
    }
    return number;
}

static struct layer * find_layer(struct hotset_ggml * g, int block) {
    /* Blocks ascend, and mostly they are the indices. */
    if (block >= 0 && (uint32_t) block < g->n_layers && g->layers[block].block == (uint32_t) block) {
        return &g->layers[block];
    }
    for (uint32_t i = 0; i < g->n_layers; i++) {
        if (g->layers[i].block == (uint32_t) block) {
            return &g->layers[i];
        }
    }
    return NULL;
}

static bool in_host_memory(const struct ggml_tensor * t) {
    const struct ggml_tensor * root = t->view_src ? t->view_src : t;
    return t->data != NULL && (root->buffer == NULL || ggml_backend_buffer_is_host(root->buffer));
}

/* Which node of the chain this is, of the current layer; -1: none. The sum of the weights has as many elements at k = 1: names tell. */
static int chain_index(const struct layer * l, const struct ggml_tensor * t) {
    for (int i = 0; i < N_CHAIN; i++) {
        if (layer_of(t->name, chain[i]) == (int) l->block) {
            const int64_t k = l->topk->ne[0], n = l->topk->ne[1];
            return t->type == GGML_TYPE_F32 && ggml_nelements(t) == k * n && ggml_is_contiguous(t) ? i : -1;
        }
    }
    return -1;
}

/* ---- binding --------------------------------------------------------------------------------------------------------- */

/* Points a tensor (or the view of a scale) at the slots or at the mapped file. The dimension that counts experts keeps its
 * extent: as many slot numbers are reserved. */
static void point(struct ggml_tensor * t, const struct hotset_bank * bank, int expert_dim, bool slots) {
    t->data = slots ? bank->base : (void *) (uintptr_t) bank->mapped;
    t->nb[expert_dim] = slots ? bank->stride_bytes : bank->slice_bytes;
    for (int d = expert_dim + 1; d < GGML_MAX_DIMS; d++) {
        t->nb[d] = t->nb[d - 1] * t->ne[d - 1];
    }
}

/* The dimension that counts experts: weight [in, out, n], bias [out, n], scale [n], which is seen as [1, n]. */
static int dim_of_experts(const struct hotset_bank * bank) {
    return bank->part == HOTSET_WEIGHT ? 2 : bank->part == HOTSET_BIAS ? 1 : 0;
}

static int find_bank(struct layer * l, struct ggml_tensor * t) {
    for (int i = 0; i < l->n_banks; i++) {
        if (l->tensors[i] == t) {
            return i;
        }
    }
    for (int i = 0; i < l->n_banks; i++) {
        if (strcmp(l->banks[i].name, t->name) == 0) {
            l->tensors[i] = t;
            return i;
        }
    }
    return -1;
}

/* After an error in a layer that is in slots: ids are expert ids again, and what may still be computed with them is computed from the file. */
static void leave_slots(struct hotset_ggml * g, struct layer * l) {
    const size_t k = (size_t) l->topk->ne[0], n = (size_t) l->topk->ne[1];
    for (size_t i = 0; i < n; i++) {
        memcpy((char *) l->topk->data + i * l->topk->nb[1], g->ids + i * k, k * sizeof(int32_t));
    }
    l->in_slots = false;
    for (int i = 0; i < l->n_banks; i++) {
        if (l->tensors[i]) {
            point(l->tensors[i], &l->banks[i], dim_of_experts(&l->banks[i]), false);
        }
    }
}

/* Until what the ids pick of a projection is there, companions included. */
static void await(struct hotset_ggml * g, struct layer * l, int32_t projection) {
    const uint32_t bit = 1u << projection;
    if (!l->in_flight || (l->awaited & bit)) {
        return;
    }
    for (int64_t row = 0; row < l->topk->ne[1]; row++) {
        const int32_t * slots = (const int32_t *) ((const char *) l->topk->data + row * l->topk->nb[1]);
        for (int64_t i = 0; i < l->topk->ne[0]; i++) {
            const int32_t status = hotset_wait(g->h, l->block, slots[i], (uint32_t) projection);
            if (status < 0) {
                fail_hotset(g, status);
                leave_slots(g, l);
                return;
            }
        }
    }
    l->awaited |= bit;
}

/* Whether the engine waits for each expert itself. Companions it does not: their layers are waited for by projection. */
static bool waits_by_expert(const struct hotset_ggml * g, const struct layer * l) {
    return g->params.wait == HOTSET_GGML_WAIT_LATEST && !l->companions && atomic_load_explicit(&l->rows_called, memory_order_relaxed);
}

/* A node that picks from `source` by the ids of layer l. */
static void bind(struct hotset_ggml * g, struct layer * l, struct ggml_tensor * source, int expert_dim) {
    struct ggml_tensor * root = source->view_src ? source->view_src : source;
    const int i = find_bank(l, root);
    if (i < 0) {
        if (l->in_slots) {
            fail(g, HOTSET_E_MODEL, "layer %u: '%s' is picked from by expert ids, but is no expert tensor of the open model", l->block, root->name);
        }
        return;
    }
    if ((uint32_t) root->type != l->banks[i].ggml_type) {
        fail(g, HOTSET_E_MODEL, "'%s' is of type %d in the engine and %u in the file: load with use_extra_bufts = false (no repacking)", root->name,
             (int) root->type, l->banks[i].ggml_type);
        return;
    }
    if (l->in_slots && !waits_by_expert(g, l)) {
        await(g, l, l->banks[i].projection);
    }
    if (l->banks[i].base || !l->in_slots) {
        point(source, &l->banks[i], expert_dim, l->in_slots && l->banks[i].base != NULL);
    }
}

/* ---- the two calls --------------------------------------------------------------------------------------------------- */

static void fill_batch(struct hotset_ggml * g, const struct layer * l, struct hotset_batch * b, uint32_t n_experts) {
    *b = hotset_batch_default();
    b->layer     = l->block;
    b->n_tokens  = (uint32_t) l->topk->ne[1];
    b->n_experts = n_experts;
    b->k         = (uint32_t) l->topk->ne[0];
    b->phase     = g->phase;
    b->position  = g->position;
    b->flags     = HOTSET_BATCH_ROUTED | (l->normalised ? HOTSET_BATCH_NORMALISED : 0) | (g->params.tail_outputs ? HOTSET_BATCH_TAIL : 0);
}

static bool ids_usable(struct hotset_ggml * g, const struct layer * l) {
    const struct ggml_tensor * ids = l->topk;
    if (ids->type != GGML_TYPE_I32 || (ids->ne[1] > 0 && (ids->nb[0] != sizeof(int32_t) || !in_host_memory(ids)))) {
        fail(g, HOTSET_E_MODEL, "layer %u: the router's choice '%s' is not a row of i32 in host memory", l->block, ids->name);
        return false;
    }
    return true;
}

/* The tensor whose order the router's choice is: what the argsort sorted. NULL where the choice was not made by one (a hash layer). */
static struct ggml_tensor * scores_of(const struct layer * l) {
    const struct ggml_tensor * sorted = l->topk->op == GGML_OP_VIEW ? l->topk->src[0] : l->topk;
    return sorted && sorted->op == GGML_OP_ARGSORT ? sorted->src[0] : NULL;
}

static int32_t score_space(const struct ggml_tensor * scores) {
    if (scores->op == GGML_OP_SOFT_MAX) {
        return HOTSET_SCORES_SOFTMAX;
    }
    return strncmp(scores->name, "ffn_moe_logits", 14) == 0 ? HOTSET_SCORES_LOGITS : HOTSET_SCORES_LINEAR;
}

static void do_select(struct hotset_ggml * g, struct layer * l) {
    struct ggml_tensor * scores = scores_of(l);
    if (!scores || !ids_usable(g, l)) {
        return;
    }
    struct hotset_batch batch;
    fill_batch(g, l, &batch, (uint32_t) scores->ne[0]);
    batch.score_space = score_space(scores);
    if (scores->type != GGML_TYPE_F32 || (batch.n_tokens > 0 && (scores->nb[0] != sizeof(float) || !in_host_memory(scores))) ||
        scores->ne[1] != l->topk->ne[1]) {
        fail(g, HOTSET_E_MODEL, "layer %u: the scores '%s' are not rows of f32 in host memory", l->block, scores->name);
        return;
    }
    const int32_t status =
        hotset_select(g->h, &batch, (const float *) scores->data, scores->nb[1], (int32_t *) l->topk->data, l->topk->nb[1]);
    if (status < 0) {
        fail_hotset(g, status);
    }
}

static bool keep_ids(struct hotset_ggml * g, const struct layer * l) {
    const size_t k = (size_t) l->topk->ne[0], n = (size_t) l->topk->ne[1];
    if (k * n > g->n_ids) {
        int32_t * grown = realloc(g->ids, k * n * sizeof(int32_t));
        if (!grown) {
            fail(g, HOTSET_E_MEMORY, "no memory for %zu expert ids", k * n);
            return false;
        }
        g->ids   = grown;
        g->n_ids = k * n;
    }
    for (size_t i = 0; i < n; i++) {
        memcpy(g->ids + i * k, (const char *) l->topk->data + i * l->topk->nb[1], k * sizeof(int32_t));
    }
    return true;
}

/* ---- reading ahead --------------------------------------------------------------------------------------------------- */

static float dot(const float * a, const float * b, int64_t n) {
    float sum[8] = { 0 }; /* side by side, so that it compiles to vectors */
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++) {
            sum[j] += a[i + j] * b[i + j];
        }
    }
    for (; i < n; i++) {
        sum[0] += a[i] * b[i];
    }
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

/* Guesses which experts the next layer will choose: its router, applied to this layer's input, which differs from its own by what this layer
 * adds. Biases are left out of it. A decode of one token only. */
static void guess_next(struct hotset_ggml * g, const struct layer * l) {
    const struct layer * next = l + 1 < g->layers + g->n_layers ? l + 1 : NULL;
    if (!g->read_ahead || !next || !next->router || !l->input || l->topk->ne[1] != 1) {
        return;
    }
    const struct ggml_tensor * w = next->router;
    const struct ggml_tensor * x = l->input;
    const int64_t n = w->ne[1];
    if (w->type != GGML_TYPE_F32 || x->type != GGML_TYPE_F32 || w->ne[0] != x->ne[0] || x->ne[1] != 1 || w->nb[0] != sizeof(float) ||
        x->nb[0] != sizeof(float) || n > next->banks[0].slots || !in_host_memory(w) || !in_host_memory(x)) {
        return;
    }
    for (int64_t e = 0; e < n; e++) {
        g->guess[e] = dot((const float *) ((const char *) w->data + e * w->nb[1]), (const float *) x->data, w->ne[0]);
    }
    int32_t best[64];
    const int64_t k = l->topk->ne[0] < 64 ? l->topk->ne[0] : 64;
    int64_t found = 0;
    for (; found < k && found < n; found++) {
        int32_t at = -1;
        for (int64_t e = 0; e < n; e++) {
            if (g->guess[e] == g->guess[e] && (at < 0 || g->guess[e] > g->guess[at])) {
                at = (int32_t) e;
            }
        }
        if (at < 0) {
            break; /* nothing but NaN is left */
        }
        best[found]    = at;
        g->guess[at] = NAN;
    }
    const int32_t status = hotset_read_ahead(g->h, next->block, best, (size_t) found);
    if (status < 0) {
        fail_hotset(g, status);
    }
}

/* ---- admission ------------------------------------------------------------------------------------------------------- */

static void do_admit(struct hotset_ggml * g, struct layer * l) {
    l->admitted  = true;
    l->in_slots  = false;
    l->in_flight = false;
    l->awaited   = 0;
    if (!ids_usable(g, l)) {
        return;
    }
    if (!l->weights) {
        l->chain_end = -1;
        fail(g, HOTSET_E_MODEL, "layer %u: the routing weights did not come before the expert matmul; their node is learned anew in the next pass",
             l->block);
        return;
    }
    if (!in_host_memory(l->weights) && l->topk->ne[1] > 0) {
        fail(g, HOTSET_E_MODEL, "layer %u: the routing weights '%s' are not in host memory", l->block, l->weights->name);
        return;
    }
    l->chain_end = l->chain_last;

    struct hotset_batch batch;
    fill_batch(g, l, &batch, l->banks[0].slots);
    if (!keep_ids(g, l)) {
        return;
    }
    /* The weights are contiguous: k a row. Without dropping they are not touched, and a layout that has them elsewhere is no matter. */
    int32_t status = hotset_admit(g->h, &batch, (int32_t *) l->topk->data, l->topk->nb[1], g->drop ? (float *) l->weights->data : NULL,
                                  (size_t) batch.k * sizeof(float), NULL);
    if (status < 0) {
        fail_hotset(g, status);
        return;
    }
    if (status == HOTSET_PASS_THROUGH) {
        return;
    }
    l->in_slots = true;
    status = g->params.wait == HOTSET_GGML_WAIT_LAYER ? hotset_wait(g->h, l->block, -1, HOTSET_ALL) : hotset_ready(g->h, l->block, -1, HOTSET_ALL);
    if (status < 0) {
        fail_hotset(g, status);
        leave_slots(g, l);
        return;
    }
    l->in_flight = status == HOTSET_IN_FLIGHT;
    guess_next(g, l);
}

/* ---- the walk -------------------------------------------------------------------------------------------------------- */

static void begin_pass(struct hotset_ggml * g, int64_t n_tokens) {
    if (g->position >= 0) {
        g->position += g->pass_tokens;
    }
    g->pass_tokens = n_tokens;
    g->phase = g->params.phase != HOTSET_GGML_PHASE_AUTO ? g->params.phase : n_tokens > 1 ? HOTSET_PREFILL : HOTSET_DECODE;

    struct hotset_shape shape = { .struct_size = sizeof(shape) };
    const int32_t status = hotset_shape(g->h, &shape);
    if (status < 0) {
        fail_hotset(g, status);
        return;
    }
    const bool prefill = g->phase == HOTSET_PREFILL;
    g->select = (shape.recording && (!prefill || (shape.prefill & HOTSET_PREFILL_RECORD))) ||
                (shape.lambda > 0 && (!prefill || (shape.prefill & HOTSET_PREFILL_MOCE))) ||
                shape.policy == HOTSET_POLICY_NEAR_PICK_EMA || shape.policy == HOTSET_POLICY_INVERSE_ROUTER_EMA;
    g->read_ahead = prefill ? 0 : shape.read_ahead;
    g->drop = shape.drop > 0 && (!prefill || (shape.prefill & HOTSET_PREFILL_DROP));
}

static bool ask_topk(struct hotset_ggml * g, struct ggml_tensor * t, int block) {
    struct layer * l = find_layer(g, block);
    if (!l) {
        fail(g, HOTSET_E_MODEL, "the graph has experts in block %d, the open model has none there", block);
        return false;
    }
    if (!g->current || l <= g->current) {
        begin_pass(g, t->ne[1]);
    }
    g->current    = l;
    l->topk       = t;
    l->weights    = NULL;
    l->chain_last = -1;
    l->normalised = false;
    l->admitted   = false;
    l->in_slots   = false;
    return g->select && scores_of(l) != NULL;
}

/* Whether a later matmul of the layer still has to be waited for: then this one is a stop. */
static bool more_in_flight(const struct hotset_ggml * g, const struct layer * l) {
    if (!l->in_slots || !l->in_flight || waits_by_expert(g, l) || hotset_ready(g->h, l->block, -1, HOTSET_ALL) != HOTSET_IN_FLIGHT) {
        return false;
    }
    for (int i = 0; i < l->n_banks; i++) {
        if (!(l->awaited & (1u << l->banks[i].projection))) {
            return true;
        }
    }
    return false;
}

/* A node of the current layer that the router's choice picks from. */
static void ask_picker(struct hotset_ggml * g, struct layer * l, struct ggml_tensor * source, int expert_dim) {
    if (!l->admitted && g->status >= 0) {
        do_admit(g, l);
    }
    /* After an error no layer is stopped at any more: ids stay expert ids, and what may still be computed is computed from the file. */
    bind(g, l, source, expert_dim);
}

static bool ask(struct hotset_ggml * g, struct ggml_tensor * t) {
    struct layer * l = g->current;
    switch (t->op) {
        case GGML_OP_MUL_MAT_ID:
            if (l && t->src[2] == l->topk) {
                ask_picker(g, l, t->src[0], 2);
                return g->status >= 0 && more_in_flight(g, l);
            } else if (strstr(t->src[0]->name, "_exps.")) {
                /* Expert tensors left pointing at slots, ids that were never turned into slots: not to be computed. */
                fail(g, HOTSET_E_MODEL, "'%s' takes its ids from '%s', not from the router's choice of its layer", t->src[0]->name, t->src[2]->name);
            }
            return false;
        case GGML_OP_ADD_ID:
            if (l && t->src[2] == l->topk) {
                ask_picker(g, l, t->src[1], 1);
            }
            return false;
        case GGML_OP_REPEAT: /* of a per-expert scale, seen as [1, n_experts]: rows are then picked by the ids */
            if (l && l->admitted && t->src[0]->view_src && strstr(t->src[0]->view_src->name, "_exps.scale")) {
                bind(g, l, t->src[0], 1);
            }
            return false;
        default:
            break;
    }
    if (strncmp(t->name, "ffn_moe_", 8) != 0) {
        return false;
    }
    int block = layer_of(t->name, "ffn_moe_topk");
    if (block >= 0) {
        return ask_topk(g, t, block);
    }
    block = layer_of(t->name, "ffn_moe_logits");
    if (block >= 0) {
        /* Before its topk. Where a bias is added the node of that name is not the product: then nothing is guessed. */
        struct layer * of = find_layer(g, block);
        if (of) {
            const bool product = t->op == GGML_OP_MUL_MAT;
            of->router = product ? t->src[0] : NULL;
            of->input  = product ? t->src[1] : NULL;
        }
        return false;
    }
    if (!l) {
        return false;
    }
    if (!l->admitted) {
        const int i = chain_index(l, t);
        if (i >= 0) {
            l->normalised |= CHAIN_NORMALISES(i);
            return l->chain_end < 0 || l->chain_end == i;
        }
    }
    if (g->drop && layer_of(t->name, "ffn_moe_weighted") == (int) l->block && l->topk->ne[1] > 0) {
        /* Dropping has to be felt: the product must take the weights that were changed, after they were. */
        if (!l->admitted ? l->topk->ne[0] > 1 : t->src[1]->data != l->weights->data) {
            fail(g, HOTSET_E_MODEL, "layer %u: '%s' does not multiply with the weights that hotset saw last: this graph cannot be dropped from", l->block,
                 t->name);
        }
    }
    return false;
}

static void stop(struct hotset_ggml * g, struct ggml_tensor * t) {
    struct layer * l = g->current;
    g->stops++;
    if (t == l->topk) {
        do_select(g, l);
    } else if (t->op != GGML_OP_MUL_MAT_ID) {
        l->weights    = t;
        l->chain_last = chain_index(l, t);
    }
}

bool hotset_ggml_eval(struct ggml_tensor * t, bool is_ask, void * user) {
    struct hotset_ggml * g = user;
    if (is_ask) {
        /* After an error expert tensors are still pointed at the file, and nothing is wanted: the engine is to abort. */
        const bool own  = ask(g, t);
        g->own_wanted   = own && g->status >= 0;
        g->chain_wanted = g->params.chain && g->params.chain(t, true, g->params.chain_user);
        return g->own_wanted || g->chain_wanted;
    }
    if (g->own_wanted && g->status >= 0) {
        stop(g, t);
    }
    /* Going on after an error is right: the next node is the one before which the engine sees hotset_ggml_aborted. */
    return !g->chain_wanted || g->params.chain(t, false, g->params.chain_user);
}

bool hotset_ggml_aborted(void * data) {
    return ((const struct hotset_ggml *) data)->status < 0;
}

/* The name of our buffer type; that it is this function tells our buffers from others. */
static const char * buft_name(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return "hotset";
}

/* ---- inside of the matmul -------------------------------------------------------------------------------------------- */

/* The number in "blk.N."; -1 for any other name. */
static int block_of(const char * name) {
    if (strncmp(name, "blk.", 4) != 0) {
        return -1;
    }
    int number = 0;
    const char * c = name + 4;
    for (; *c >= '0' && *c <= '9' && number <= 100000; c++) {
        number = number * 10 + (*c - '0');
    }
    return c > name + 4 && *c == '.' ? number : -1;
}

/* The rows of a slot whose read failed, from the file: the decode is being aborted, and computes with nothing that was not read. */
static const void * mapped_rows(const struct hotset_ggml * g, const struct layer * l, const struct hotset_bank * bank, int64_t slot) {
    const size_t k = (size_t) l->topk->ne[0], n = (size_t) l->topk->ne[1];
    for (size_t i = 0; i < k * n; i++) {
        if (((const int32_t *) ((const char *) l->topk->data + i / k * l->topk->nb[1]))[i % k] == slot) {
            return (const char *) bank->mapped + (size_t) g->ids[i] * bank->slice_bytes;
        }
    }
    return bank->mapped;
}

const void * hotset_ggml_rows(const struct ggml_tensor * node, int64_t id, bool wait) {
    const struct ggml_tensor * t    = node->src[0];
    const void *               rows = (const char *) t->data + id * t->nb[2];
    const struct ggml_tensor * root = t->view_src ? t->view_src : t;
    if (!root->buffer || root->buffer->buft->iface.get_name != buft_name) {
        return rows; /* not one of ours */
    }
    struct hotset_ggml * g = root->buffer->buft->context;
    struct layer *       l = find_layer(g, block_of(root->name));
    if (!l) {
        return rows;
    }
    if (!atomic_load_explicit(&l->rows_called, memory_order_relaxed)) {
        atomic_store_explicit(&l->rows_called, true, memory_order_relaxed);
    }
    if (!l->in_slots || !l->in_flight) {
        return rows;
    }
    for (int i = 0; i < l->n_banks; i++) {
        const struct hotset_bank * bank = &l->banks[i];
        if (l->tensors[i] != root || (l->awaited & (1u << bank->projection))) {
            continue;
        }
        int32_t status = hotset_ready(g->h, l->block, (int32_t) id, (uint32_t) bank->projection);
        if (status == HOTSET_IN_FLIGHT) {
            if (!wait) {
                return NULL;
            }
            status = hotset_wait(g->h, l->block, (int32_t) id, (uint32_t) bank->projection);
        }
        if (status < 0) {
            fail_hotset(g, status);
            return mapped_rows(g, l, bank, id);
        }
    }
    return rows;
}

/* ---- the buffer type ------------------------------------------------------------------------------------------------- */

static size_t buft_alignment(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return 64;
}

static bool buft_is_host(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return true;
}

static void buffer_free(ggml_backend_buffer_t buffer) {
    munmap(buffer->context, buffer->size);
}

static void * buffer_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

static void buffer_memset(ggml_backend_buffer_t buffer, struct ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    (void) buffer, (void) t, (void) value, (void) offset, (void) size; /* the file is read only */
}

/* The engine hands over a tensor with the bytes in its own mapping: they are not touched, the tensor is pointed at hotset's. */
static void buffer_set(ggml_backend_buffer_t buffer, struct ggml_tensor * t, const void * data, size_t offset, size_t size) {
    struct hotset_ggml * g = buffer->buft->context;
    (void) data, (void) offset, (void) size;
    for (uint32_t i = 0; i < g->n_layers; i++) {
        const int b = find_bank(&g->layers[i], t);
        if (b >= 0) {
            const struct hotset_bank * bank = &g->layers[i].banks[b];
            if ((uint32_t) t->type != bank->ggml_type || ggml_nbytes(t) != bank->slice_bytes * bank->slots) {
                fail(g, HOTSET_E_MODEL, "'%s' has type %d and %zu bytes in the engine, type %u and %llu bytes in the open model", t->name, (int) t->type,
                     ggml_nbytes(t), bank->ggml_type, (unsigned long long) (bank->slice_bytes * bank->slots));
                return;
            }
            t->data = (void *) (uintptr_t) bank->mapped;
            return;
        }
    }
    fail(g, HOTSET_E_MODEL, "'%s' is no expert tensor of the open model", t->name);
}

static void buffer_get(ggml_backend_buffer_t buffer, const struct ggml_tensor * t, void * data, size_t offset, size_t size) {
    (void) buffer;
    memcpy(data, (const char *) t->data + offset, size);
}

static void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    (void) buffer, (void) value;
}

/* Address space only: tensors get an address in it until they are handed over. */
static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    static const struct ggml_backend_buffer_i iface = {
        .free_buffer   = buffer_free,
        .get_base      = buffer_base,
        .memset_tensor = buffer_memset,
        .set_tensor    = buffer_set,
        .get_tensor    = buffer_get,
        .clear         = buffer_clear,
    };
    void * base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : ggml_backend_buffer_init(buft, iface, base, size);
}

ggml_backend_buffer_type_t hotset_ggml_buffer_type(struct hotset_ggml * g) {
    return &g->buft;
}

/* ---- opening --------------------------------------------------------------------------------------------------------- */

struct hotset_ggml_params hotset_ggml_params_default(void) {
    struct hotset_ggml_params p = { .struct_size = sizeof(p), .phase = HOTSET_GGML_PHASE_AUTO };
    return p;
}

static int32_t read_layers(struct hotset_ggml * g) {
    const int32_t n = hotset_blocks(g->h, NULL, 0);
    if (n < 0) {
        return n;
    }
    uint32_t * blocks = calloc((size_t) n + 1, sizeof(*blocks));
    g->layers = calloc((size_t) n + 1, sizeof(*g->layers));
    if (!blocks || !g->layers) {
        free(blocks);
        return HOTSET_E_MEMORY;
    }
    hotset_blocks(g->h, blocks, (size_t) n);
    g->n_layers = (uint32_t) n;
    int32_t status = HOTSET_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        struct layer * l = &g->layers[i];
        l->block     = blocks[i];
        l->chain_end = -1;
        l->banks[0].struct_size = sizeof(struct hotset_bank);
        status = hotset_banks(g->h, l->block, l->banks, MAX_BANKS);
        l->n_banks = status;
        if (status > MAX_BANKS) {
            status = HOTSET_E_MODEL;
        }
        for (int32_t b = 0; b < status; b++) {
            l->companions |= l->banks[b].part != HOTSET_WEIGHT;
        }
    }
    free(blocks);
    uint32_t most = 1;
    for (uint32_t i = 0; i < g->n_layers; i++) {
        most = g->layers[i].banks[0].slots > most ? g->layers[i].banks[0].slots : most;
    }
    g->guess = malloc(most * sizeof(float));
    if (!g->guess) {
        return HOTSET_E_MEMORY;
    }
    return status < 0 ? status : HOTSET_OK;
}

int32_t hotset_ggml_init(struct hotset * h, const struct hotset_ggml_params * p, struct hotset_ggml ** out) {
    if (!out) {
        return HOTSET_E_ARGUMENT;
    }
    *out = NULL;
    if (!h || hotset_abi_version() != HOTSET_ABI_VERSION || (p && (p->struct_size < sizeof(*p) || p->wait < 0 || p->wait > HOTSET_GGML_WAIT_LAYER))) {
        return HOTSET_E_ARGUMENT;
    }
    struct hotset_ggml * g = calloc(1, sizeof(*g));
    if (!g) {
        return HOTSET_E_MEMORY;
    }
    g->h        = h;
    g->params   = p ? *p : hotset_ggml_params_default();
    g->position = -1;
    g->buft     = (struct ggml_backend_buffer_type) {
        .iface   = { .get_name = buft_name, .alloc_buffer = buft_alloc, .get_alignment = buft_alignment, .is_host = buft_is_host },
        .context = g,
    };
    const int32_t status = read_layers(g);
    if (status < 0) {
        hotset_ggml_free(g);
        return status;
    }
    *out = g;
    return HOTSET_OK;
}

void hotset_ggml_free(struct hotset_ggml * g) {
    if (g) {
        free(g->layers);
        free(g->ids);
        free(g->guess);
        free(g);
    }
}

int32_t hotset_ggml_status(const struct hotset_ggml * g) {
    return g->status;
}

const char * hotset_ggml_error(const struct hotset_ggml * g) {
    return g->error;
}

void hotset_ggml_clear(struct hotset_ggml * g) {
    g->error[0] = 0;
    atomic_store(&g->status, HOTSET_OK);
    atomic_flag_clear(&g->failing);
}

void hotset_ggml_set_phase(struct hotset_ggml * g, int32_t phase) {
    g->params.phase = phase;
}

void hotset_ggml_set_position(struct hotset_ggml * g, int64_t position) {
    g->position    = position;
    g->pass_tokens = 0;
}

uint64_t hotset_ggml_stops(const struct hotset_ggml * g) {
    return g->stops;
}
