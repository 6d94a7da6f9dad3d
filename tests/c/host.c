/* A C host: all of hotset.h as an engine without ggml would call it, and each error status provoked.
 *
 *     host MODEL.gguf SCRATCH_FOLDER
 *
 * Not provoked: HOTSET_E_INTERNAL, which would be a bug.
 *
 * Needs a model in one file, whose layers have the same number of experts, at least 3 x k of them, and 2 layers or more with experts. Prints
 * "N checks passed", or the checks that failed, and then returns 1.
 */
#define _POSIX_C_SOURCE 200809L /* setenv, truncate */

#include "hotset.h"

#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int n_checks, n_failed;

#define CHECK(got, wanted) check_int(__FILE__, __LINE__, #got, (long long) (got), (long long) (wanted))
#define CHECK_TRUE(what)   CHECK(!!(what), 1)
#define CHECK_HAS(text, part) check_has(__FILE__, __LINE__, #text, (text), (part))

static int check_int(const char * file, int line, const char * what, long long got, long long wanted) {
    n_checks++;
    if (got == wanted) return 1;
    n_failed++;
    printf("%s:%d: %s is %lld (%s), not %lld\n", file, line, what, got, hotset_strerror((int32_t) got), wanted);
    return 0;
}

static int check_has(const char * file, int line, const char * what, const char * text, const char * part) {
    n_checks++;
    if (text != NULL && strstr(text, part) != NULL) return 1;
    n_failed++;
    printf("%s:%d: %s is \"%s\", without \"%s\"\n", file, line, what, text ? text : "(null)", part);
    return 0;
}

/* ---- helpers --------------------------------------------------------------------------------------------------------- */

enum { MAX_LAYERS = 512, MAX_EXPERTS = 2048, MAX_K = 64, MAX_ROWS = 64, MAX_BANKS = 16 };

static const char * model_path;
static const char * scratch;

static struct hotset_shape shape;
static uint32_t            blocks[MAX_LAYERS];
static float               scores[MAX_ROWS * MAX_EXPERTS];
static float               weights[MAX_ROWS * MAX_K];
static int32_t             ids[MAX_ROWS * MAX_K];
static int32_t             experts[MAX_ROWS * MAX_K]; /* ids before hotset_admit */
static int                 n_log_lines;

static void path_of(char * out, size_t size, const char * name) { snprintf(out, size, "%s/%s", scratch, name); }

static uint32_t random_state = 1;
static float random_float(void) { /* -4..4 */
    random_state = random_state * 1664525u + 1013904223u;
    return (float) (random_state >> 8) / (float) (1 << 24) * 8.0f - 4.0f;
}

static void on_log(int32_t level, const char * text, void * user) {
    CHECK_TRUE(level >= HOTSET_LOG_ERROR && level <= HOTSET_LOG_INFO);
    CHECK_TRUE(text != NULL && strchr(text, '\n') == NULL);
    ++*(int *) user;
}

static void make_scores(uint32_t rows) {
    for (uint32_t i = 0; i < rows * shape.n_experts; i++) scores[i] = random_float();
}

static void write_file(const char * path, const void * bytes, size_t n) {
    FILE * f = fopen(path, "wb");
    if (CHECK_TRUE(f != NULL)) {
        CHECK(fwrite(bytes, 1, n, f), n);
        CHECK(fclose(f), 0);
    }
}

/* the whole of a file, to be freed */
static unsigned char * read_file(const char * path, size_t * n) {
    FILE * f = fopen(path, "rb");
    *n = 0;
    if (!CHECK_TRUE(f != NULL)) return NULL;
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    fseek(f, 0, SEEK_SET);
    unsigned char * bytes = malloc((size_t) size + 1);
    *n = fread(bytes, 1, (size_t) size, f);
    CHECK(*n, size);
    fclose(f);
    return bytes;
}

static struct hotset_batch batch_of(uint32_t layer, uint32_t rows) {
    struct hotset_batch b = hotset_batch_default();
    b.layer     = layer;
    b.n_tokens  = rows;
    b.n_experts = shape.n_experts;
    b.k         = shape.k;
    b.flags     = HOTSET_BATCH_NORMALISED;
    return b;
}

/* k numbers per row: each in 0..limit, none twice */
static void check_rows(const int32_t * rows, uint32_t n, uint32_t k, uint32_t limit) {
    int bad = 0;
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < k; i++) {
            int32_t id = rows[t * k + i];
            bad += id < 0 || (uint32_t) id >= limit;
            for (uint32_t j = 0; j < i; j++) bad += rows[t * k + j] == id;
        }
    CHECK(bad, 0);
}

static void softmax_of_chosen(uint32_t rows) {
    for (uint32_t t = 0; t < rows; t++) {
        float sum = 0;
        for (uint32_t i = 0; i < shape.k; i++) sum += weights[t * shape.k + i] = expf(scores[t * shape.n_experts + (uint32_t) ids[t * shape.k + i]]);
        for (uint32_t i = 0; i < shape.k; i++) weights[t * shape.k + i] /= sum;
    }
}

/* after hotset_wait: each slot holds the bytes of its expert as they are in the file */
static void check_bytes(struct hotset * h, uint32_t layer, uint32_t rows) {
    struct hotset_bank banks[MAX_BANKS] = { { .struct_size = sizeof(struct hotset_bank) } };
    int32_t            n = hotset_banks(h, layer, banks, MAX_BANKS);
    int                bad = 0;
    CHECK_TRUE(n >= 2 && n <= MAX_BANKS);
    for (int32_t b = 0; b < n && b < MAX_BANKS; b++)
        for (uint32_t i = 0; i < rows * shape.k; i++) {
            if (weights[i] == 0) continue; /* dropped: another expert's slot */
            const char * slot = (const char *) banks[b].base + banks[b].stride_bytes * (uint64_t) ids[i];
            const char * file = (const char *) banks[b].mapped + banks[b].slice_bytes * (uint64_t) experts[i];
            bad += memcmp(slot, file, banks[b].slice_bytes) != 0;
        }
    CHECK(bad, 0);
}

/* ---- before anything is open ------------------------------------------------------------------------------------------ */

static void check_words(void) {
    CHECK(hotset_abi_version(), HOTSET_ABI_VERSION);
    CHECK_HAS(hotset_version(), ".");
    for (int32_t s = HOTSET_E_INTERNAL; s <= HOTSET_IN_FLIGHT; s++) {
        CHECK_TRUE(hotset_strerror(s)[0] != 0);
        for (int32_t r = HOTSET_E_INTERNAL; r < s; r++) CHECK_TRUE(strcmp(hotset_strerror(s), hotset_strerror(r)) != 0);
    }
    CHECK_TRUE(hotset_strerror(INT_MIN) != NULL && hotset_strerror(12345) != NULL);
    CHECK(hotset_last_error(NULL)[0], 0);
    char empty[2] = "xy";
    hotset_copy_last_error(NULL, empty, 1);
    CHECK(empty[0], 0);
    CHECK(empty[1], 'y');
    hotset_copy_last_error(NULL, NULL, 0);
    hotset_close(NULL);
}

static void check_environment(void) {
    char                 detail[256] = "";
    struct hotset_params p = hotset_params_default(), before;
    p.detail      = detail;
    p.detail_size = sizeof detail;
    setenv("HOTSET_SLOTS", "17", 1);
    setenv("HOTSET_CACHE_BYTES", "3M", 1);
    setenv("HOTSET_LAMBDA", "0.12", 1);
    setenv("HOTSET_BACKING", "page-cache", 1);
    setenv("HOTSET_PREFILL", "record,drop", 1);
    setenv("HOTSET_LANES", "", 1);
    setenv("HOTSET_SCHEDULE", "plan.json", 1);
    setenv("HOTSET_CHUNK", "128K", 1);
    setenv("HOTSET_PACK", "some.hotset", 1);
    CHECK(hotset_params_from_env(&p), HOTSET_OK);
    CHECK(p.slots, 17);
    CHECK(p.cache_bytes, 3 << 20);
    CHECK_TRUE(p.lambda == 0.12);
    CHECK(p.backing, HOTSET_BACKING_PAGE_CACHE);
    CHECK(p.prefill, HOTSET_PREFILL_RECORD | HOTSET_PREFILL_DROP);
    CHECK(p.lanes, hotset_params_default().lanes);
    CHECK(strcmp(p.schedule, "plan.json"), 0);
    CHECK(hotset_params_default().chunk_bytes, HOTSET_CHUNK_BYTES);
    CHECK(p.chunk_bytes, 128 << 10);
    CHECK_TRUE(p.pack != NULL && strcmp(p.pack, "some.hotset") == 0);

    const char * const bad[][2] = { { "HOTSET_SLOTS", "many" },  { "HOTSET_SLOTS", "-1" },   { "HOTSET_CACHE_BYTES", "7Q" }, { "HOTSET_LAMBDA", "nan" },
                                    { "HOTSET_DROP", "-0.5" },   { "HOTSET_IO", "quick" },   { "HOTSET_DELTA", "full" },     { "HOTSET_PREFILL", "record,all" },
                                    { "HOTSET_DENSE", "melt" },  { "HOTSET_LANES", "65" },   { "HOTSET_POLICY", "belady_min" },
                                    { "HOTSET_CHUNK", "0.5M" },  { "HOTSET_READ_BY", "hand" } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const char * good = strcmp(bad[i][0], "HOTSET_SLOTS") == 0 ? "18" : "";
        setenv(bad[i][0], bad[i][1], 1);
        if (good[0] == 0) setenv("HOTSET_SLOTS", "18", 1); /* which must not be taken over */
        before = p;
        CHECK(hotset_params_from_env(&p), HOTSET_E_ARGUMENT);
        CHECK_HAS(detail, bad[i][0]);
        CHECK(p.slots, before.slots);
        CHECK(p.prefill, before.prefill);
        setenv(bad[i][0], good, 1);
    }
    const char * const all[] = { "HOTSET_SLOTS", "HOTSET_CACHE_BYTES", "HOTSET_LAMBDA", "HOTSET_BACKING", "HOTSET_PREFILL", "HOTSET_LANES", "HOTSET_DROP",
                                 "HOTSET_IO",    "HOTSET_DELTA",       "HOTSET_DENSE",  "HOTSET_POLICY", "HOTSET_SCHEDULE",
                                 "HOTSET_CHUNK", "HOTSET_PACK",        "HOTSET_READ_BY" };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) unsetenv(all[i]);
    CHECK(hotset_params_from_env(NULL), HOTSET_E_ARGUMENT);
    p.struct_size = 0;
    CHECK(hotset_params_from_env(&p), HOTSET_E_ARGUMENT);
}

/* opens with these settings, which must fail with this status and a detail */
#define CHECK_REFUSED(path, p, status) check_refused(__LINE__, path, p, status)
static char refusal[512];
static void check_refused(int line, const char * path, struct hotset_params p, int32_t status) {
    struct hotset * h = (struct hotset *) &h; /* not NULL, so that it is seen to be set */
    memset(refusal, 'x', sizeof refusal);
    p.detail      = refusal;
    p.detail_size = sizeof refusal;
    check_int(__FILE__, line, "hotset_open", hotset_open(path, &p, &h), status);
    check_int(__FILE__, line, "the handle is NULL", h == NULL, 1);
    check_int(__FILE__, line, "the detail ends", memchr(refusal, 0, sizeof refusal) != NULL, 1);
    check_int(__FILE__, line, "the detail says something", refusal[0] != 0 && refusal[0] != 'x', 1);
}

static void check_refusals(const struct hotset_plan * plan) {
    struct hotset_params p = hotset_params_default();
    struct hotset *      h = NULL;
    char                 path[1024], number[32];

    CHECK(hotset_open(NULL, &p, &h), HOTSET_E_ARGUMENT);
    CHECK(hotset_open(model_path, &p, NULL), HOTSET_E_ARGUMENT);
    p.struct_size = 0;
    CHECK_TRUE(hotset_open(model_path, &p, &h) == HOTSET_E_ARGUMENT && h == NULL);
    p.struct_size = sizeof p - 9;
    CHECK_TRUE(hotset_open(model_path, &p, &h) == HOTSET_E_ARGUMENT && h == NULL);

#define WITH(member, value, status) p = hotset_params_default(); p.member = value; CHECK_REFUSED(model_path, p, status)
    WITH(backing, 2, HOTSET_E_ARGUMENT);
    WITH(io, -1, HOTSET_E_ARGUMENT);
    WITH(dense, 3, HOTSET_E_ARGUMENT);
    WITH(policy, 5, HOTSET_E_ARGUMENT);
    WITH(policy, -1, HOTSET_E_ARGUMENT);
    WITH(delta, 3, HOTSET_E_ARGUMENT);
    WITH(renormalise, 3, HOTSET_E_ARGUMENT);
    WITH(prefill, 8, HOTSET_E_ARGUMENT);
    WITH(lanes, 65, HOTSET_E_ARGUMENT);
    WITH(lambda, -0.1, HOTSET_E_ARGUMENT);
    WITH(lambda, (double) NAN, HOTSET_E_ARGUMENT);
    WITH(drop, -0.1, HOTSET_E_ARGUMENT);
    WITH(k, plan->n_experts + 1, HOTSET_E_ARGUMENT);

    /* fewer slots than one token needs: the detail has the numbers */
    WITH(slots, plan->k - 1, HOTSET_E_BUDGET);
    snprintf(number, sizeof number, "%u", plan->k);
    CHECK_HAS(refusal, number);
    WITH(cache_bytes, plan->min_bytes - 1, HOTSET_E_BUDGET);
    snprintf(number, sizeof number, "%llu", (unsigned long long) plan->min_bytes);
    CHECK_HAS(refusal, number);

    p       = hotset_params_default();
    p.slots = plan->k;
    path_of(path, sizeof path, "no-such-file.gguf");
    CHECK_REFUSED(path, p, HOTSET_E_IO);
    path_of(path, sizeof path, "text.gguf");
    write_file(path, "this is not a model, though it has the length of a header", 57);
    CHECK_REFUSED(path, p, HOTSET_E_FORMAT);
    path_of(path, sizeof path, "empty.gguf");
    write_file(path, "", 0);
    CHECK_REFUSED(path, p, HOTSET_E_FORMAT);
    path_of(path, sizeof path, "no-experts.gguf"); /* version 3, no tensors, no metadata */
    write_file(path, "GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24);
    CHECK_REFUSED(path, p, HOTSET_E_MODEL);

    size_t          n;
    unsigned char * bytes = read_file(model_path, &n);
    if (bytes != NULL) {
        path_of(path, sizeof path, "cut.gguf"); /* within the tensors, then within the header */
        write_file(path, bytes, n - n / 4);
        CHECK_REFUSED(path, p, HOTSET_E_FORMAT);
        write_file(path, bytes, 100);
        CHECK_REFUSED(path, p, HOTSET_E_FORMAT);
        free(bytes);
    }

    path_of(path, sizeof path, "no-such-folder/t.q4rt");
    p.trace = path;
    CHECK_REFUSED(model_path, p, HOTSET_E_IO);

    /* a short buffer is ended within its size, one of size 0 is left alone */
    char tiny[4] = { 'a', 'a', 'a', 'a' };
    p             = hotset_params_default();
    p.slots       = 1;
    p.detail      = tiny;
    p.detail_size = 0;
    CHECK(hotset_open(model_path, &p, &h), HOTSET_E_BUDGET);
    CHECK(tiny[0], 'a');
    p.detail_size = 3;
    CHECK(hotset_open(model_path, &p, &h), HOTSET_E_BUDGET);
    CHECK_TRUE(memchr(tiny, 0, 3) != NULL && tiny[3] == 'a');
}

static void check_plan(struct hotset_plan * plan) {
    struct hotset_params p = hotset_params_default();
    memset(plan, 0, sizeof *plan);
    CHECK(hotset_plan(model_path, &p, plan), HOTSET_E_ARGUMENT); /* struct_size 0 */
    plan->struct_size = sizeof *plan;
    CHECK(hotset_plan(NULL, &p, plan), HOTSET_E_ARGUMENT);
    CHECK(hotset_plan(model_path, &p, NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_plan("/no/such/file.gguf", &p, plan), HOTSET_E_IO);
    CHECK(hotset_plan(model_path, &p, plan), HOTSET_OK);
    CHECK(plan->min_slots, plan->k);
    CHECK(plan->cache_bytes, plan->slots * plan->slot_bytes);
    CHECK(plan->min_bytes, plan->min_slots * plan->slot_bytes + plan->staging_bytes);
    CHECK_TRUE(plan->n_layers > 1 && plan->n_experts >= 3 * plan->k && plan->expert_bytes > 0 && plan->dense_bytes > 0 && plan->memory_bytes > 0);
}

/* ---- one handle ------------------------------------------------------------------------------------------------------- */

/* one layer of a decode, with every service; the sums are for the comparison with hotset_stats */
static void decode_layer(struct hotset * h, uint32_t layer, uint32_t rows, uint64_t * hits, uint64_t * misses) {
    const uint32_t        k = shape.k;
    struct hotset_batch   b = batch_of(layer, rows);
    struct hotset_outcome o = { .struct_size = sizeof o };
    make_scores(rows);
    CHECK(hotset_select(h, &b, scores, shape.n_experts * sizeof(float), ids, k * sizeof(int32_t)), HOTSET_OK);
    check_rows(ids, rows, k, shape.n_experts);
    softmax_of_chosen(rows);
    memcpy(experts, ids, sizeof ids);
    CHECK(hotset_admit(h, &b, ids, k * sizeof(int32_t), weights, k * sizeof(float), &o), HOTSET_OK);
    CHECK(o.placement, HOTSET_OK);
    CHECK(o.hits + o.misses + o.dropped, rows * k);
    check_rows(ids, rows, k, shape.n_experts); /* slot numbers are below n_experts */
    const int32_t early = hotset_ready(h, layer, ids[0], HOTSET_DOWN);
    CHECK(early == HOTSET_OK || early == HOTSET_IN_FLIGHT, 1);
    CHECK(hotset_wait(h, layer, ids[0], HOTSET_DOWN), HOTSET_OK);
    CHECK(hotset_ready(h, layer, ids[0], HOTSET_DOWN), HOTSET_OK);
    CHECK(hotset_wait(h, layer, ids[k - 1], HOTSET_ALL), HOTSET_OK);
    CHECK(hotset_ready(h, layer, ids[k - 1], HOTSET_ALL), HOTSET_OK);
    CHECK(hotset_wait(h, layer, -1, HOTSET_ALL), HOTSET_OK);
    CHECK(hotset_ready(h, layer, -1, HOTSET_ALL), HOTSET_OK);
    check_bytes(h, layer, rows);
    *hits += o.hits;
    *misses += o.misses;
}

/* bad calls of one layer: the status, and that nothing was written */
static void check_bad_calls(struct hotset * h, uint32_t layer) {
    const uint32_t      k = shape.k;
    const size_t        is = k * sizeof(int32_t), ws = k * sizeof(float), ss = shape.n_experts * sizeof(float);
    struct hotset_batch b = batch_of(layer, 2);
    int32_t             in[2 * MAX_K], before[2 * MAX_K];
    float               w[2 * MAX_K];
    struct hotset_stats s0 = { .struct_size = sizeof s0 }, s1 = { .struct_size = sizeof s1 };
    for (uint32_t i = 0; i < 2 * k; i++) {
        in[i] = (int32_t) (i % k);
        w[i]  = 1.0f / (float) k;
    }
    make_scores(2);
    CHECK(hotset_stats(h, &s0), HOTSET_OK);

#define BAD_BATCH(member, value, status)                                                    \
    do {                                                                                    \
        struct hotset_batch bad = b;                                                        \
        bad.member = value;                                                                 \
        memcpy(before, in, sizeof in);                                                      \
        CHECK(hotset_select(h, &bad, scores, ss, in, is), status);                          \
        CHECK(hotset_admit(h, &bad, in, is, w, ws, NULL), status);                          \
        CHECK(hotset_layer(h, &bad, scores, ss, in, is, w, ws, NULL), status);              \
        CHECK(memcmp(before, in, sizeof in), 0);                                            \
        CHECK_TRUE(hotset_last_error(h)[0] != 0);                                           \
        char copy[16] = "";                                                                 \
        hotset_copy_last_error(h, copy, sizeof copy);                                       \
        CHECK(strncmp(copy, hotset_last_error(h), sizeof copy - 1), 0);                     \
    } while (0)
    BAD_BATCH(struct_size, 0, HOTSET_E_ARGUMENT);
    BAD_BATCH(layer, 100000, HOTSET_E_RANGE);
    BAD_BATCH(layer, UINT32_MAX, HOTSET_E_RANGE);
    BAD_BATCH(n_experts, shape.n_experts - 1, HOTSET_E_ARGUMENT);
    BAD_BATCH(n_experts, 0, HOTSET_E_ARGUMENT);
    BAD_BATCH(k, k + 1, HOTSET_E_ARGUMENT);
    BAD_BATCH(k, UINT32_MAX, HOTSET_E_ARGUMENT);
    BAD_BATCH(phase, 2, HOTSET_E_ARGUMENT);

#define BAD_ID(value)                                                       \
    do {                                                                    \
        int32_t kept = in[k + 1];                                           \
        in[k + 1]    = value;                                               \
        memcpy(before, in, sizeof in);                                      \
        CHECK(hotset_admit(h, &b, in, is, w, ws, NULL), HOTSET_E_RANGE);    \
        CHECK(memcmp(before, in, sizeof in), 0);                            \
        in[k + 1] = kept;                                                   \
    } while (0)
    BAD_ID(-1);
    BAD_ID((int32_t) shape.n_experts);
    BAD_ID(INT32_MIN);
    BAD_ID(INT32_MAX);
    BAD_ID(in[k]); /* twice in one token */

    CHECK(hotset_select(NULL, &b, scores, ss, in, is), HOTSET_E_ARGUMENT);
    CHECK(hotset_select(h, NULL, scores, ss, in, is), HOTSET_E_ARGUMENT);
    CHECK(hotset_select(h, &b, NULL, ss, in, is), HOTSET_E_ARGUMENT);
    CHECK(hotset_select(h, &b, scores, ss, NULL, is), HOTSET_E_ARGUMENT);
    CHECK(hotset_select(h, &b, scores, ss - 1, in, is), HOTSET_E_ARGUMENT);
    CHECK(hotset_select(h, &b, scores, ss, in, is - 1), HOTSET_E_ARGUMENT);
    CHECK(hotset_admit(NULL, &b, in, is, w, ws, NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_admit(h, NULL, in, is, w, ws, NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_admit(h, &b, NULL, is, w, ws, NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_admit(h, &b, in, is - 1, w, ws, NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_admit(h, &b, in, is, w, ws - 1, NULL), HOTSET_E_ARGUMENT);
    struct hotset_outcome o = { .struct_size = 0 };
    CHECK(hotset_admit(h, &b, in, is, w, ws, &o), HOTSET_E_ARGUMENT);
    CHECK(hotset_layer(h, &b, scores, ss, in, is, NULL, ws, NULL), HOTSET_E_ARGUMENT);

    CHECK(hotset_wait(NULL, layer, -1, HOTSET_ALL), HOTSET_E_ARGUMENT);
    CHECK(hotset_wait(h, 100000, -1, HOTSET_ALL), HOTSET_E_RANGE);
    CHECK(hotset_wait(h, layer, (int32_t) shape.n_experts, HOTSET_ALL), HOTSET_E_RANGE);
    CHECK(hotset_wait(h, layer, -2, HOTSET_ALL), HOTSET_E_RANGE);
    CHECK(hotset_wait(h, layer, INT32_MIN, HOTSET_ALL), HOTSET_E_RANGE);
    CHECK(hotset_wait(h, layer, 0, 77), HOTSET_E_RANGE);
    CHECK(hotset_ready(NULL, layer, -1, HOTSET_ALL), HOTSET_E_ARGUMENT);
    CHECK(hotset_ready(h, 100000, -1, HOTSET_ALL), HOTSET_E_RANGE);
    CHECK(hotset_ready(h, layer, (int32_t) shape.n_experts, HOTSET_ALL), HOTSET_E_RANGE);
    CHECK(hotset_ready(h, layer, -2, HOTSET_ALL), HOTSET_E_RANGE);
    CHECK(hotset_ready(h, layer, 0, 77), HOTSET_E_RANGE);
    const int32_t none = -1;
    CHECK(hotset_read_ahead(NULL, layer, in, 1), HOTSET_E_ARGUMENT);
    CHECK(hotset_read_ahead(h, layer, NULL, 1), HOTSET_E_ARGUMENT);
    CHECK(hotset_read_ahead(h, layer, NULL, 0), 0);
    CHECK(hotset_read_ahead(h, 100000, in, 1), HOTSET_E_RANGE);
    CHECK(hotset_read_ahead(h, layer, &none, 1), HOTSET_E_RANGE);
    CHECK(hotset_read_ahead(h, layer, in, 1), 0); /* no slots are set aside here */

    /* none of it was counted, or moved anything */
    CHECK(hotset_stats(h, &s1), HOTSET_OK);
    CHECK(s1.hits, s0.hits);
    CHECK(s1.misses, s0.misses);
    CHECK(s1.resident, s0.resident);
    CHECK(s1.decode_tokens, s0.decode_tokens);
}

static void check_handle_calls(struct hotset * h) {
    struct hotset_shape s = { .struct_size = 0 };
    struct hotset_stats t = { .struct_size = 0 };
    struct hotset_bank  b = { .struct_size = 0 };
    uint64_t            n;
    CHECK(hotset_shape(h, &s), HOTSET_E_ARGUMENT);
    CHECK(hotset_shape(h, NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_shape(NULL, &shape), HOTSET_E_ARGUMENT);
    CHECK(hotset_stats(h, &t), HOTSET_E_ARGUMENT);
    CHECK(hotset_stats(h, NULL), HOTSET_E_ARGUMENT);
    t.struct_size = sizeof t;
    CHECK(hotset_stats(NULL, &t), HOTSET_E_ARGUMENT);
    CHECK(hotset_banks(h, blocks[0], &b, 1), HOTSET_E_ARGUMENT);
    b.struct_size = sizeof b;
    CHECK(hotset_banks(h, 100000, &b, 1), HOTSET_E_RANGE);
    CHECK(hotset_blocks(h, NULL, 0), shape.n_layers);
    CHECK(hotset_blocks(h, NULL, 3), HOTSET_E_ARGUMENT);
    CHECK(hotset_blocks(NULL, blocks, 1), HOTSET_E_ARGUMENT);
    CHECK(hotset_layer_stats(h, 100000, &n, NULL, NULL), HOTSET_E_RANGE);
    CHECK(hotset_layer_stats(NULL, blocks[0], &n, NULL, NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_drop(h, -1, HOTSET_RENORMALISE_AUTO), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_drop(h, (double) NAN, HOTSET_RENORMALISE_AUTO), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_drop(h, 0, 9), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_drop(NULL, 0, 0), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_moce(h, -1, 0, HOTSET_DELTA_TOKEN_TOPK), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_moce(h, 0, 0, 9), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_moce(NULL, 0, 0, 0), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_slots(h, shape.k - 1), HOTSET_E_BUDGET);
    CHECK(hotset_set_slots(NULL, 0), HOTSET_E_ARGUMENT);
    CHECK(hotset_set_cache_bytes(h, 1), HOTSET_E_BUDGET);
    CHECK(hotset_set_cache_bytes(NULL, 0), HOTSET_E_ARGUMENT);
    CHECK(hotset_reset(NULL), HOTSET_E_ARGUMENT);
    CHECK(hotset_trace_flush(NULL, 0), HOTSET_E_ARGUMENT);
}

static void check_session(const struct hotset_plan * plan) {
    char                 trace[1024], metrics[1024];
    struct hotset *      h = NULL;
    struct hotset_params p = hotset_params_default();
    struct hotset_stats  s = { .struct_size = sizeof s };
    uint64_t             hits = 0, misses = 0;
    path_of(trace, sizeof trace, "host.q4rt");
    path_of(metrics, sizeof metrics, "host.jsonl");
    p.slots    = 2 * plan->k + 1;
    p.trace    = trace;
    p.metrics  = metrics;
    p.log      = on_log;
    p.log_user = &n_log_lines;
    if (!CHECK(hotset_open(model_path, &p, &h), HOTSET_OK)) return;
    trace[0] = metrics[0] = 0; /* strings were copied */
    CHECK(hotset_last_error(h)[0], 0);

    shape.struct_size = sizeof shape;
    CHECK(hotset_shape(h, &shape), HOTSET_OK);
    CHECK(shape.slots, p.slots);
    CHECK(shape.k, plan->k);
    CHECK(shape.n_layers, plan->n_layers);
    CHECK(shape.n_experts, plan->n_experts);
    CHECK(shape.recording, 1);
    CHECK_TRUE(shape.lanes > 0 && shape.io_reason != NULL && shape.read_by_reason != NULL && shape.dense_reason != NULL && shape.architecture != NULL);
    CHECK(shape.cache_bytes, shape.slots * shape.slot_bytes);
    CHECK(hotset_blocks(h, blocks, MAX_LAYERS), shape.n_layers);
    if (shape.n_layers > MAX_LAYERS || shape.n_experts > MAX_EXPERTS || shape.k > MAX_K) {
        printf("the model is too large for this program\n");
        exit(2);
    }
    const uint32_t k = shape.k, n_layers = shape.n_layers;

    struct hotset_bank banks[MAX_BANKS] = { { .struct_size = sizeof(struct hotset_bank) } };
    int32_t            n_banks = hotset_banks(h, blocks[0], banks, MAX_BANKS);
    CHECK_TRUE(n_banks >= 2);
    for (int32_t i = 0; i < n_banks && i < MAX_BANKS; i++) {
        CHECK_TRUE(banks[i].base != NULL && banks[i].mapped != NULL && banks[i].name != NULL);
        CHECK_TRUE(banks[i].stride_bytes >= banks[i].slice_bytes && banks[i].stride_bytes % 4096 == 0);
    }
    check_handle_calls(h);

    /* a decode of 20 tokens, one a pass; then of pairs, where both tokens' experts may or may not be the same */
    for (int t = 0; t < 20; t++)
        for (uint32_t l = 0; l < n_layers; l++) decode_layer(h, blocks[l], 1, &hits, &misses);
    for (uint32_t l = 0; l < n_layers; l++) decode_layer(h, blocks[l], 2, &hits, &misses);
    CHECK(hotset_stats(h, &s), HOTSET_OK);
    CHECK(s.passes, 21);
    CHECK(s.decode_tokens, 22);
    CHECK(s.hits, hits);
    CHECK(s.misses, misses);
    CHECK_TRUE(s.reads > 0 && s.failed_reads == 0 && s.read_bytes > 0 && s.resident <= (uint64_t) shape.slots * n_layers);
    uint64_t by_layer = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        uint64_t a = 0, b = 0, c = 0;
        CHECK(hotset_layer_stats(h, blocks[l], &a, &b, &c), HOTSET_OK);
        CHECK(hotset_layer_stats(h, blocks[l], NULL, NULL, NULL), HOTSET_OK);
        by_layer += a + b + c;
    }
    CHECK(by_layer, hits + misses);

    /* bad calls between passes, then in the midst of one */
    check_bad_calls(h, blocks[0]);
    decode_layer(h, blocks[0], 1, &hits, &misses);
    check_bad_calls(h, blocks[1]);
    CHECK(hotset_wait(h, blocks[0], (int32_t) shape.n_experts - 1, HOTSET_ALL), HOTSET_E_STATE); /* nothing was read into that slot */
    CHECK(hotset_ready(h, blocks[0], (int32_t) shape.n_experts - 1, HOTSET_ALL), HOTSET_E_STATE);
    for (uint32_t l = 1; l < n_layers; l++) decode_layer(h, blocks[l], 1, &hits, &misses);

    /* rows further apart than they are long: what lies between stays */
    {
        struct hotset_batch b = batch_of(blocks[0], 2);
        int32_t             wide[2 * (MAX_K + 3)];
        const size_t        stride = k + 3;
        for (size_t i = 0; i < 2 * stride; i++) wide[i] = -77;
        make_scores(2);
        CHECK(hotset_select(h, &b, scores, shape.n_experts * sizeof(float), wide, stride * sizeof(int32_t)), HOTSET_OK);
        CHECK(hotset_admit(h, &b, wide, stride * sizeof(int32_t), NULL, 0, NULL), HOTSET_OK);
        int touched = 0;
        for (size_t i = 0; i < 2 * stride; i++) touched += i % stride >= k && wide[i] != -77;
        CHECK(touched, 0);
        check_rows(wide, 1, k, shape.n_experts);
        check_rows(wide + stride, 1, k, shape.n_experts);
        b = batch_of(blocks[1], 0); /* no rows: legal, does nothing */
        CHECK(hotset_select(h, &b, scores, shape.n_experts * sizeof(float), wide, stride * sizeof(int32_t)), HOTSET_OK);
        CHECK(hotset_admit(h, &b, wide, stride * sizeof(int32_t), NULL, 0, NULL), HOTSET_OK);
        CHECK(hotset_wait(h, blocks[1], -1, HOTSET_ALL), HOTSET_OK);
    }

    /* a prefill that uses more experts than there are slots passes through, and leaves the cache as it was */
    {
        CHECK(hotset_stats(h, &s), HOTSET_OK);
        const uint64_t resident = s.resident;
        for (uint32_t l = 0; l < n_layers; l++) {
            struct hotset_batch   b = batch_of(blocks[l], 3);
            struct hotset_outcome o = { .struct_size = sizeof o };
            b.phase = HOTSET_PREFILL;
            for (uint32_t i = 0; i < 3 * k; i++) {
                ids[i] = experts[i] = (int32_t) i;
                weights[i] = 1.0f / (float) k;
            }
            CHECK(hotset_admit(h, &b, ids, k * sizeof(int32_t), weights, k * sizeof(float), &o), HOTSET_PASS_THROUGH);
            CHECK(o.placement, HOTSET_PASS_THROUGH);
            CHECK(memcmp(ids, experts, 3 * k * sizeof(int32_t)), 0);
        }
        CHECK(hotset_stats(h, &s), HOTSET_OK);
        CHECK(s.resident, resident);
        CHECK(s.pass_through_rows, 3 * n_layers);
        CHECK(s.prefill_tokens, 3);
    }

    /* reranking and dropping, by the call for engines without a graph */
    CHECK(hotset_set_moce(h, 0.3, 1, HOTSET_DELTA_TOKEN_FULL), HOTSET_OK);
    CHECK(hotset_set_drop(h, 0.9, HOTSET_RENORMALISE_ON), HOTSET_OK);
    CHECK(hotset_shape(h, &shape), HOTSET_OK);
    CHECK_TRUE(shape.lambda == 0.3 && shape.drop == 0.9 && shape.top_j == 1);
    CHECK(shape.delta, HOTSET_DELTA_TOKEN_FULL);
    CHECK(shape.policy, HOTSET_POLICY_LRU);
    CHECK(shape.renormalise, HOTSET_RENORMALISE_ON);
    uint64_t dropped = 0, zeros = 0;
    for (int t = 0; t < 20; t++)
        for (uint32_t l = 0; l < n_layers; l++) {
            struct hotset_batch   b = batch_of(blocks[l], 1);
            struct hotset_outcome o = { .struct_size = sizeof o };
            float                 sum = 0;
            make_scores(1);
            CHECK(hotset_layer(h, &b, scores, shape.n_experts * sizeof(float), ids, k * sizeof(int32_t), weights, k * sizeof(float), &o), HOTSET_OK);
            check_rows(ids, 1, k, shape.n_experts);
            for (uint32_t i = 0; i < k; i++) {
                sum += weights[i];
                zeros += weights[i] == 0;
            }
            CHECK_TRUE(fabsf(sum - 1) < 1e-4f);
            dropped += o.dropped;
            CHECK(hotset_wait(h, blocks[l], -1, HOTSET_ALL), HOTSET_OK);
        }
    CHECK(zeros, dropped);
    CHECK_TRUE(dropped > 0);
    CHECK(hotset_stats(h, &s), HOTSET_OK);
    CHECK(s.dropped, dropped);
    CHECK_TRUE(s.swapped > 0 && s.mass_swapped > 0 && s.mass_dropped > 0);

    /* a row with a NaN: the router's own choice stays */
    for (uint32_t l = 0; l < n_layers; l++) {
        struct hotset_batch b = batch_of(blocks[l], 1);
        b.flags |= HOTSET_BATCH_ROUTED;
        make_scores(1);
        scores[shape.n_experts / 2] = NAN;
        for (uint32_t i = 0; i < k; i++) ids[i] = experts[i] = (int32_t) (2 * i + 1);
        CHECK(hotset_select(h, &b, scores, shape.n_experts * sizeof(float), ids, k * sizeof(int32_t)), HOTSET_OK);
        CHECK(memcmp(ids, experts, k * sizeof(int32_t)), 0);
        CHECK(hotset_admit(h, &b, ids, k * sizeof(int32_t), NULL, 0, NULL), HOTSET_OK);
    }
    CHECK(hotset_stats(h, &s), HOTSET_OK);
    CHECK(s.bad_rows, n_layers);

    /* fewer slots, and back to none of the policies */
    CHECK(hotset_set_drop(h, 0, HOTSET_RENORMALISE_AUTO), HOTSET_OK);
    CHECK(hotset_set_moce(h, 0, 0, HOTSET_DELTA_TOKEN_TOPK), HOTSET_OK);
    CHECK(hotset_set_slots(h, k + 1), HOTSET_OK);
    CHECK(hotset_shape(h, &shape), HOTSET_OK);
    CHECK(shape.slots, k + 1);
    for (uint32_t l = 0; l < n_layers; l++) decode_layer(h, blocks[l], 1, &hits, &misses);
    CHECK(hotset_stats(h, &s), HOTSET_OK);
    CHECK_TRUE(s.resident <= (uint64_t) (k + 1) * n_layers);

    /* what was recorded is in the file after a flush */
    CHECK(hotset_trace_flush(h, 0), HOTSET_OK);
    CHECK(hotset_stats(h, &s), HOTSET_OK);
    const uint64_t recorded = s.recorded_tokens;
    CHECK_TRUE(recorded > 40);

    /* another handle, of the other backing: this one does not notice */
    {
        struct hotset *      other = NULL;
        struct hotset_params q = hotset_params_default();
        struct hotset_stats  after = { .struct_size = sizeof after };
        q.backing = HOTSET_BACKING_PAGE_CACHE;
        q.slots   = k;
        if (CHECK(hotset_open(model_path, &q, &other), HOTSET_OK)) {
            struct hotset_shape theirs = { .struct_size = sizeof theirs };
            CHECK(hotset_shape(other, &theirs), HOTSET_OK);
            CHECK(theirs.backing, HOTSET_BACKING_PAGE_CACHE);
            CHECK(theirs.recording, 0);
            banks[0].struct_size = sizeof banks[0];
            CHECK(hotset_banks(other, blocks[0], banks, MAX_BANKS), n_banks);
            CHECK_TRUE(banks[0].base == NULL && banks[0].mapped != NULL);
            for (uint32_t l = 0; l < n_layers; l++) {
                struct hotset_batch b = batch_of(blocks[l], 1);
                for (uint32_t i = 0; i < k; i++) ids[i] = experts[i] = (int32_t) (3 * i);
                CHECK(hotset_admit(other, &b, ids, k * sizeof(int32_t), NULL, 0, NULL), HOTSET_OK);
                CHECK(memcmp(ids, experts, k * sizeof(int32_t)), 0);
                CHECK(hotset_wait(other, blocks[l], -1, HOTSET_ALL), HOTSET_OK);
            }
            CHECK(hotset_last_error(other)[0], 0);
            CHECK(hotset_trace_flush(other, 0), HOTSET_E_STATE); /* nothing is being written */
            hotset_close(other);
        }
        CHECK(hotset_stats(h, &after), HOTSET_OK);
        CHECK(memcmp(&s, &after, sizeof s), 0);
    }

    CHECK(hotset_reset(h), HOTSET_OK);
    CHECK(hotset_stats(h, &s), HOTSET_OK);
    CHECK(s.passes + s.hits + s.misses + s.dropped + s.resident, 0);
    hotset_close(h);
    CHECK_TRUE(n_log_lines > 0); /* which modes are in effect, at least */

    /* Q4RT: magic, version, layers, experts, top_m, tokens, and nothing but whole tokens after it */
    size_t          n;
    path_of(trace, sizeof trace, "host.q4rt");
    unsigned char * bytes = read_file(trace, &n);
    if (bytes != NULL && CHECK_TRUE(n > 16)) {
        const uint32_t top_m = bytes[10] | (uint32_t) bytes[11] << 8;
        const uint32_t count = bytes[12] | (uint32_t) bytes[13] << 8 | (uint32_t) bytes[14] << 16 | (uint32_t) bytes[15] << 24;
        CHECK(memcmp(bytes, "Q4RT\1\0", 6), 0);
        CHECK(bytes[6] | bytes[7] << 8, n_layers);
        CHECK(bytes[8] | bytes[9] << 8, shape.n_experts);
        CHECK(top_m, shape.top_m);
        CHECK(count, recorded);
        CHECK(n, 16 + (size_t) count * n_layers * top_m * 4);
    }
    free(bytes);
    path_of(metrics, sizeof metrics, "host.jsonl");
    bytes = read_file(metrics, &n);
    CHECK_TRUE(bytes != NULL && n > 0 && bytes[0] == '{' && bytes[n - 1] == '\n');
    free(bytes);
}

/* settings that follow a plan: four decode tokens a block, in slots, from the mapped file, in fewer slots; then the engine's own again */
static void check_schedule(void) {
    char                 path[512], bad[512], metrics[512], text[1024];
    struct hotset *      h = NULL;
    struct hotset_params p = hotset_params_default();
    const uint32_t       k = shape.k;
    path_of(path, sizeof path, "plan.json");
    path_of(bad, sizeof bad, "bad.json");
    path_of(metrics, sizeof metrics, "scheduled.csv");
    snprintf(text, sizeof text,
             "{ \"hotset_schedule\": 1, \"washout\": 1, \"carry\": \"flush\",\n"
             "  \"cells\": [ {\"name\": \"A\", \"lambda\": 0.25, \"lanes\": 6},\n"
             "    {\"name\": \"file\", \"backing\": \"page-cache\"},\n"
             "    {\"name\": \"few\", \"slots\": %u} ],\n"
             "  \"blocks\": [ {\"cell\": \"A\", \"from\": 0, \"tokens\": 4}, {\"cell\": \"file\", \"from\": 4, \"tokens\": 4},\n"
             "    {\"cell\": \"few\", \"from\": 8, \"tokens\": 4} ] }\n",
             k);
    write_file(path, text, strlen(text));
    write_file(bad, "{ \"hotset_schedule\": 1,\n  \"cell\": [] }", 38);

    p.slots    = k + 2;
    p.metrics  = metrics;
    p.schedule = bad;
    CHECK_REFUSED(model_path, p, HOTSET_E_FORMAT);
    CHECK_HAS(refusal, "bad.json: line 2: ");
    CHECK_HAS(refusal, "\"cell\"");
    p.schedule = "/no/such/plan.json";
    CHECK_REFUSED(model_path, p, HOTSET_E_IO);
    p.schedule = path;
    if (!CHECK(hotset_open(model_path, &p, &h), HOTSET_OK)) return;

    for (int t = 0; t < 14; t++) {
        const int           block = t / 4; /* 3: behind the last */
        struct hotset_shape now   = { .struct_size = sizeof now };
        CHECK(hotset_shape(h, &now), HOTSET_OK); /* of the pass to come */
        CHECK_TRUE(now.lambda == (block == 0 ? 0.25 : 0));
        CHECK(now.lanes, block == 0 ? 6 : p.lanes);
        CHECK(now.slots, block == 2 ? k : k + 2);
        for (uint32_t l = 0; l < shape.n_layers; l++) {
            struct hotset_batch   b = batch_of(blocks[l], 1);
            struct hotset_outcome o = { .struct_size = sizeof o };
            make_scores(1);
            CHECK(hotset_select(h, &b, scores, shape.n_experts * sizeof(float), ids, k * sizeof(int32_t)), HOTSET_OK);
            memcpy(experts, ids, sizeof ids);
            const int32_t placed = hotset_admit(h, &b, ids, k * sizeof(int32_t), NULL, 0, &o);
            CHECK(placed, block == 1 ? HOTSET_PASS_THROUGH : HOTSET_OK);
            CHECK(o.placement, placed);
            CHECK(o.hits + o.misses, k);
            if (t % 4 == 0 && block < 3) CHECK(o.hits, 0); /* begins empty */
            CHECK(hotset_wait(h, blocks[l], -1, HOTSET_ALL), HOTSET_OK);
            if (block == 1) {
                CHECK(memcmp(ids, experts, k * sizeof(int32_t)), 0);
            } else {
                check_bytes(h, blocks[l], 1);
            }
        }
    }
    CHECK(hotset_set_schedule(h, bad), HOTSET_E_FORMAT);
    CHECK_HAS(hotset_last_error(h), "bad.json: line 2: ");
    CHECK(hotset_set_schedule(h, "/no/such/plan.json"), HOTSET_E_IO);
    CHECK(hotset_set_schedule(NULL, path), HOTSET_E_ARGUMENT);
    snprintf(text, sizeof text,
             "{\"hotset_schedule\": 1, \"cells\": [\n{\"name\": \"more\", \"slots\": %u}],\n"
             "\"blocks\": [{\"cell\": \"more\", \"from\": 0, \"tokens\": 9}]}",
             k + 3);
    write_file(bad, text, strlen(text));
    CHECK(hotset_set_schedule(h, bad), HOTSET_E_BUDGET);
    CHECK_HAS(hotset_last_error(h), "bad.json: line 2: cell \"more\"");
    CHECK(hotset_set_schedule(h, path), HOTSET_OK); /* from its 0 on */
    struct hotset_shape now = { .struct_size = sizeof now };
    CHECK(hotset_shape(h, &now), HOTSET_OK);
    CHECK_TRUE(now.lambda == 0.25);
    CHECK(hotset_set_schedule(h, NULL), HOTSET_OK);
    CHECK(hotset_shape(h, &now), HOTSET_OK);
    CHECK_TRUE(now.lambda == 0 && now.slots == k + 2);
    CHECK(hotset_set_schedule(h, ""), HOTSET_OK);
    CHECK(hotset_trace_flush(h, 0), HOTSET_OK);
    hotset_close(h);

    size_t          n;
    unsigned char * bytes = read_file(metrics, &n);
    if (bytes != NULL) {
        char * log = malloc(n + 1); /* with an end */
        if (log != NULL) {
            memcpy(log, bytes, n);
            log[n] = 0;
            CHECK_HAS(log, ",A,0,1,");
            CHECK_HAS(log, ",file,1,0,");
            CHECK_HAS(log, ",few,2,1,");
        }
        free(log);
    }
    free(bytes);
}

/* the model's file is cut while it is open: the reads that this spoils are an error, and later ones too */
static void check_changed_file(void) {
    char                 path[1024];
    size_t               n;
    struct hotset *      h = NULL;
    struct hotset_params p = hotset_params_default();
    unsigned char *      bytes = read_file(model_path, &n);
    if (bytes == NULL) return;
    path_of(path, sizeof path, "changing.gguf");
    write_file(path, bytes, n);
    free(bytes);
    p.slots = shape.k;
    p.dense = HOTSET_DENSE_LEAVE;
    if (!CHECK(hotset_open(path, &p, &h), HOTSET_OK)) return;
    CHECK(truncate(path, (off_t) (n / 16)), 0);
    int32_t first = HOTSET_OK;
    for (uint32_t l = 0; l < shape.n_layers && first == HOTSET_OK; l++) {
        struct hotset_batch b = batch_of(blocks[l], 1);
        for (uint32_t i = 0; i < shape.k; i++) ids[i] = (int32_t) (shape.n_experts - 1 - i);
        first = hotset_admit(h, &b, ids, shape.k * sizeof(int32_t), NULL, 0, NULL);
        if (first == HOTSET_OK) first = hotset_wait(h, blocks[l], -1, HOTSET_ALL);
    }
    CHECK(first, HOTSET_E_CHANGED);
    CHECK_TRUE(hotset_last_error(h)[0] != 0);
    hotset_close(h);
}

static void put(FILE * f, uint64_t value, size_t bytes) { /* little endian */
    for (size_t i = 0; i < bytes; i++) fputc((int) (value >> (8 * i) & 255), f);
}

/* More address space than there is: a sparse file with two experts of 12 GiB in a layer, and 65,534 small ones in another. A slot number is
 * reserved for each expert, so that the slots of the first layer would take 768 TiB. */
static void check_memory(void) {
    static const char * const projections[] = { "gate", "up", "down" };
    const uint64_t            wide[4] = { 1 << 15, 1 << 15, 2, UINT64_C(8) << 30 }, many[4] = { 1, 1, 65534, 262144 }; /* shape, bytes padded to 32 */
    char                      path[512];
    path_of(path, sizeof path, "vast.gguf");
    FILE * f = fopen(path, "wb");
    if (!CHECK_TRUE(f != NULL)) return;
    fputs("GGUF", f);
    put(f, 3, 4), put(f, 6, 8), put(f, 0, 8); /* version, tensors, metadata */
    uint64_t offset = 0;
    for (int i = 0; i < 6; i++) {
        const uint64_t * shape = i < 3 ? wide : many;
        char             name[64];
        snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight", i / 3, projections[i % 3]);
        put(f, strlen(name), 8), fputs(name, f);
        put(f, 3, 4), put(f, shape[0], 8), put(f, shape[1], 8), put(f, shape[2], 8);
        put(f, 0, 4), put(f, offset, 8); /* f32 */
        offset += shape[3];
    }
    const long header = ftell(f);
    fclose(f);
    CHECK(truncate(path, (off_t) ((header + 31) / 32 * 32 + (off_t) offset)), 0);
    struct hotset_params p = hotset_params_default();
    p.k     = 1;
    p.slots = 1;
    CHECK_REFUSED(path, p, HOTSET_E_MEMORY);
    unlink(path);
}

/* A metrics log that nobody takes in: a pipe with a reader that does not read. Decoding goes on, rows are counted as lost, a flush ends at its bound. */
static void check_timeout(void) {
    char path[512];
    path_of(path, sizeof path, "stuck.jsonl");
    unlink(path);
    if (!CHECK(mkfifo(path, 0600), 0)) return;
    const int            reader = open(path, O_RDONLY | O_NONBLOCK);
    struct hotset *      h      = NULL;
    struct hotset_params p      = hotset_params_default();
    struct hotset_stats  s      = { .struct_size = sizeof s };
    p.slots   = shape.k + 2;
    p.metrics = path;
    if (CHECK(hotset_open(model_path, &p, &h), HOTSET_OK)) {
        for (int t = 0; t < 2000; t++)
            for (uint32_t l = 0; l < shape.n_layers; l++) {
                struct hotset_batch b = batch_of(blocks[l], 1);
                for (uint32_t i = 0; i < shape.k; i++) ids[i] = (int32_t) i;
                if (hotset_admit(h, &b, ids, shape.k * sizeof(int32_t), NULL, 0, NULL) != HOTSET_OK) CHECK(-1, HOTSET_OK);
            }
        CHECK(hotset_trace_flush(h, 50), HOTSET_E_TIMEOUT);
        CHECK(hotset_stats(h, &s), HOTSET_OK);
        CHECK(s.passes, 2000);
        CHECK_TRUE(s.lost_metrics > 0);
        signal(SIGPIPE, SIG_IGN);
        close(reader); /* the writer's next write fails, and closing ends */
        hotset_close(h);
    }
    unlink(path);
}

/* Experts that were read from a pack: in the slots are the mapped file's bytes. */
static void check_pack(const char * pack, const struct hotset_plan * plain) {
    struct hotset *      h = NULL;
    struct hotset_plan   plan = { .struct_size = sizeof plan };
    struct hotset_shape  packed = { .struct_size = sizeof packed };
    struct hotset_params p = hotset_params_default();
    p.slots = plain->k;
    p.pack  = model_path; /* a file, but no pack */
    CHECK_REFUSED(model_path, p, HOTSET_E_FORMAT);
    p.pack = "/nowhere.hotset";
    CHECK_REFUSED(model_path, p, HOTSET_E_IO);
    p.pack    = pack;
    p.backing = HOTSET_BACKING_PAGE_CACHE;
    CHECK_REFUSED(model_path, p, HOTSET_E_ARGUMENT);
    p.backing     = HOTSET_BACKING_SLOTS;
    p.chunk_bytes = 1000;
    CHECK_REFUSED(model_path, p, HOTSET_E_ARGUMENT);
    p.chunk_bytes = 64 << 10;
    CHECK(hotset_plan(model_path, &p, &plan), HOTSET_OK);
    CHECK_TRUE(plan.slot_bytes > 0 && plan.slot_bytes % 16384 == 0);
    if (!CHECK(hotset_open(model_path, &p, &h), HOTSET_OK)) return;
    CHECK(hotset_shape(h, &packed), HOTSET_OK);
    CHECK(packed.slot_bytes, plan.slot_bytes);
    CHECK(packed.bounced_bytes, 0);
    CHECK_TRUE((packed.io == HOTSET_IO_DIRECT) == (packed.straight_bytes > 0));
    for (uint32_t l = 0; l < plan.n_layers; l++) {
        struct hotset_bank  banks[MAX_BANKS] = { { .struct_size = sizeof(struct hotset_bank) } };
        const int32_t       n = hotset_banks(h, blocks[l], banks, MAX_BANKS);
        struct hotset_batch b = batch_of(blocks[l], 1);
        for (uint32_t i = 0; i < plan.k; i++) ids[i] = (int32_t) (plan.n_experts - 1 - i);
        CHECK(hotset_admit(h, &b, ids, plan.k * sizeof(int32_t), NULL, 0, NULL), HOTSET_OK);
        CHECK(hotset_wait(h, blocks[l], -1, HOTSET_ALL), HOTSET_OK);
        for (int32_t j = 0; j < n && j < MAX_BANKS; j++)
            for (uint32_t i = 0; i < plan.k; i++) {
                const char * slot = (const char *) banks[j].base + (size_t) ids[i] * banks[j].stride_bytes;
                const char * file = (const char *) banks[j].mapped + (size_t) (plan.n_experts - 1 - i) * banks[j].slice_bytes;
                CHECK(memcmp(slot, file, banks[j].slice_bytes), 0);
            }
    }
    hotset_close(h);
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: host MODEL.gguf SCRATCH_FOLDER PACK.hotset\n");
        return 2;
    }
    model_path = argv[1];
    scratch    = argv[2];
    struct hotset_plan plan;
    check_words();
    check_environment();
    check_plan(&plan);
    if (n_failed == 0) check_refusals(&plan);
    if (n_failed == 0) check_session(&plan);
    if (n_failed == 0) check_schedule();
    if (n_failed == 0) check_pack(argv[3], &plan);
    if (n_failed == 0) check_memory();
    if (n_failed == 0) check_timeout();
    if (n_failed == 0) check_changed_file();
    if (n_failed != 0) {
        printf("%d of %d checks failed\n", n_failed, n_checks);
        return 1;
    }
    printf("%d checks passed\n", n_checks);
    return 0;
}
