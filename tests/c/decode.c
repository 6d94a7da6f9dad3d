/* An engine without ggml, as small as one can be: made-up routing scores, one hotset_layer for each MoE layer of a token, and "compute" that
 * reads every byte of the experts that run. All settings come from the environment, so it can be experimented with like any other:
 *
 *     decode MODEL.gguf TOKENS
 *     hotset ab run --plan plan.json --out runs -- decode MODEL.gguf 2000
 *
 * Prints the number of tokens and a sum over the bytes; returns 1 with the reason where something fails.
 */
#include "hotset.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_LAYERS = 512, MAX_EXPERTS = 2048, MAX_K = 64, MAX_BANKS = 16 };

static uint64_t random_state = 1;
static float    random_float(void) { /* 0..1 */
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float) (random_state >> 40) / (1 << 24);
}

static int fail(const char * what, const char * detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    return 1;
}

/* Scores of a router whose tokens resemble the one before: some of the last choice stays. */
static void route(float * scores, uint32_t n) {
    for (uint32_t e = 0; e < n; e++) scores[e] = 0.8f * scores[e] + 2 * (random_float() - 0.5f);
}

static uint64_t sum_of(const uint8_t * bytes, uint64_t n) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++) sum += bytes[i];
    return sum;
}

int main(int argc, char ** argv) {
    static char     detail[512];
    static uint32_t blocks[MAX_LAYERS];
    static float    scores[MAX_LAYERS][MAX_EXPERTS], weights[MAX_K];
    static int32_t  ids[MAX_K];
    if (argc != 3) return fail("usage", "decode MODEL.gguf TOKENS");

    struct hotset *      h = NULL;
    struct hotset_params p = hotset_params_default();
    p.detail               = detail;
    p.detail_size          = sizeof detail;
    if (hotset_params_from_env(&p) != HOTSET_OK || hotset_open(argv[1], &p, &h) != HOTSET_OK) return fail("hotset", detail);
    struct hotset_shape shape = { .struct_size = sizeof shape };
    hotset_shape(h, &shape);
    if (shape.n_layers > MAX_LAYERS || shape.n_experts > MAX_EXPERTS || shape.k > MAX_K) return fail(argv[1], "larger than this example");
    hotset_blocks(h, blocks, MAX_LAYERS);

    uint64_t sum = 0;
    for (long token = 0, n = atol(argv[2]); token < n; token++) {
        for (uint32_t l = 0; l < shape.n_layers; l++) {
            struct hotset_bank  banks[MAX_BANKS] = { { .struct_size = sizeof banks[0] } };
            struct hotset_batch b                = hotset_batch_default();
            const int32_t       n_banks          = hotset_banks(h, blocks[l], banks, MAX_BANKS);
            b.layer     = blocks[l];
            b.n_tokens  = 1;
            b.n_experts = banks[0].slots; /* one number a slot, and a slot for each expert */
            b.k         = shape.k;
            route(scores[l], b.n_experts);
            const int32_t placed = hotset_layer(h, &b, scores[l], sizeof scores[l], ids, sizeof ids, weights, sizeof weights, NULL);
            if (placed < 0 || hotset_wait(h, blocks[l], -1, HOTSET_ALL) < 0) return fail("hotset", hotset_last_error(h));
            for (uint32_t i = 0; i < shape.k; i++) {
                for (int32_t t = 0; t < n_banks && weights[i] > 0; t++) {
                    const int       in_slots = placed == HOTSET_OK && banks[t].base != NULL;
                    const uint8_t * first    = in_slots ? banks[t].base : banks[t].mapped;
                    const uint64_t  stride   = in_slots ? banks[t].stride_bytes : banks[t].slice_bytes;
                    sum += sum_of(first + (uint64_t) ids[i] * stride, banks[t].slice_bytes);
                }
            }
        }
    }
    hotset_close(h);
    printf("%s tokens, sum %llu\n", argv[2], (unsigned long long) sum);
    return 0;
}
