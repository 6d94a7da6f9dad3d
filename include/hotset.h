/* hotset.h - which experts of a Mixture-of-Experts model run, and which of them are in memory.
 *
 * An inference engine opens a model's GGUF file here, and calls at each MoE layer of a decode:
 *
 *     hotset_select  after the router's top k, before the routing weights are made of it: records the scores, and
 *                    puts resident experts in the place of absent ones that score almost as well (MoCE);
 *     hotset_admit   after the routing weights: leaves out what is absent and barely weighted (cold drop), starts the
 *                    reads of what is absent, and turns expert ids into slots;
 *     hotset_wait    before the experts are computed with: until their bytes are there.
 *
 * Settings that need none of a call's services allow it to be left out: hotset_admit and hotset_wait alone are a cache.
 * Engines built on ggml have these calls made for them: see hotset_ggml.h.
 *
 * Conventions
 *   Status      0 is success, negative an error, positive success with a condition that the caller acts on. An error
 *               changes nothing, unless its text here says otherwise; its detail (file, tensor, numbers) is
 *               in hotset_last_error(), or in hotset_params.detail where there is no handle yet.
 *   struct_size the first member of every struct: set it to sizeof the struct (the *_default functions do), so that a later
 *               library knows what an earlier caller has. A size of 0, or below the struct's size in ABI version 1, is HOTSET_E_ARGUMENT.
 *   Strides     in bytes, from one token's row to the next; within a row elements are adjacent.
 *   Layers      are named by the block number in the file (the 3 in "blk.3."); blocks without experts are no layers here.
 *   Experts     0 <= id < n_experts of that layer, distinct within a token.
 *   Threads     hotset_select, hotset_admit and hotset_layer: one thread at a time, layers in ascending order within a pass. hotset_wait
 *               and hotset_ready: any thread, several at once. Everything else: any thread; it may wait for a per-layer call in progress.
 *   Passes      begin with the first call for a layer that is not behind the previous call's, and end with
 *               hotset_admit of the last layer. What a pass that was cut off (an aborted decode) left is put in order then.
 *   Globals     none. Two handles know nothing of each other.
 */
#ifndef HOTSET_H
#define HOTSET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a struct or a call changes in a way that struct_size does not cover. */
#define HOTSET_ABI_VERSION 1u

/* ---- status ---------------------------------------------------------------------------------------------------------- */

enum {
    HOTSET_OK            =  0,
    HOTSET_PASS_THROUGH  =  1, /* hotset_admit: ids are expert ids still, compute from hotset_bank.mapped */
    HOTSET_IN_FLIGHT     =  2, /* hotset_ready: not there yet */
    HOTSET_E_ARGUMENT    = -1, /* null pointer, unknown enum value, bad size or stride, n_experts or k not the model's */
    HOTSET_E_RANGE       = -2, /* a layer, expert, slot or projection that is not there; an id twice in one token */
    HOTSET_E_IO          = -3, /* the system refused a file operation or a read */
    HOTSET_E_FORMAT      = -4, /* a file is not what its format says */
    HOTSET_E_MODEL       = -5, /* a sound file, but not a model whose experts can be kept in slots; a pack of another model */
    HOTSET_E_CHANGED     = -6, /* a file changed while it was in use */
    HOTSET_E_BUDGET      = -7, /* fewer slots than one token needs; the detail says how many bytes it takes */
    HOTSET_E_MEMORY      = -8, /* the system has no memory left */
    HOTSET_E_STATE       = -9, /* not possible now: waiting for a slot that nothing was read into, flushing where nothing is written */
    HOTSET_E_TIMEOUT     = -10, /* hotset_wait, hotset_trace_flush: the bound ran out */
    HOTSET_E_INTERNAL    = -11  /* a bug in hotset, caught at this border */
};

struct hotset; /* one open model with its cache: opaque, made by hotset_open, ended by hotset_close */

/* HOTSET_ABI_VERSION of the library, to be compared with the header's. */
uint32_t hotset_abi_version(void);

/* The library's version, for example "0.1.0". Static. */
const char * hotset_version(void);

/* A status in words. Static, never NULL. */
const char * hotset_strerror(int32_t status);

/* The detail of the last call on this handle that failed, or "". Valid until the next call on the handle that fails;
 * where several threads call, hotset_params.log is the better place to look. NULL gives "". */
const char * hotset_last_error(const struct hotset * h);

/* The same, copied into a buffer of size bytes (cut, and always ended with 0; 0 bytes: nothing). For callers whose threads may fail at once. */
void hotset_copy_last_error(const struct hotset * h, char * buffer, size_t size);

/* ---- settings -------------------------------------------------------------------------------------------------------- */

enum { /* hotset_params.backing */
    HOTSET_BACKING_SLOTS      = 0, /* experts are read into slots: what is resident is known and bounded */
    HOTSET_BACKING_PAGE_CACHE = 1  /* no slots: the engine computes from the mapped file, hotset hints to the system what comes next.
                                      hits and misses are then those that slots would have had */
};
enum { /* hotset_params.io */
    HOTSET_IO_DIRECT   = 0, /* past the page cache (O_DIRECT, F_NOCACHE); where refused: buffered, and hotset_shape.io says so */
    HOTSET_IO_BUFFERED = 1
};
enum { /* hotset_params.read_by: who makes the reads */
    HOTSET_READ_BY_RING    = 0, /* one thread with an io_uring, on Linux, where the library was built with it (feature io-uring), the system permits it
                                   and reads are direct; else threads, and hotset_shape.read_by says so */
    HOTSET_READ_BY_THREADS = 1  /* a thread a lane */
};
enum { /* hotset_params.dense: what happens to the weights that every token uses */
    HOTSET_DENSE_LOCK  = 0, /* locked in memory as far as the system's limit goes; the rest is warmed */
    HOTSET_DENSE_WARM  = 1, /* read once at open */
    HOTSET_DENSE_LEAVE = 2
};
enum { /* hotset_params.policy: which resident expert goes when room is needed. The popularities decay by .99 a token */
    HOTSET_POLICY_LRU                = 0, /* the least recently used */
    HOTSET_POLICY_LFU                = 1, /* the least frequently used */
    HOTSET_POLICY_EMA                = 2, /* the one of least popularity: what ran counts */
    HOTSET_POLICY_NEAR_PICK_EMA      = 3, /* the same, but the router's first 48 count, whatever ran */
    HOTSET_POLICY_INVERSE_ROUTER_EMA = 4  /* the same, but the candidates' scores count. This and the one before need hotset_select:
                                             where it is not called they choose the least recently used */
};
enum { /* hotset_params.delta: what the MoCE bonus is a share of */
    HOTSET_DELTA_TOKEN_TOPK   = 0, /* first minus k-th score of the token (the reference replayer's) */
    HOTSET_DELTA_TOKEN_FULL   = 1, /* largest minus smallest score of the token */
    HOTSET_DELTA_RUNNING_FULL = 2  /* the running mean of that range in the layer (the cache-prior paper's) */
};
enum { /* hotset_params.renormalise: are the weights that are left scaled to the sum they had? */
    HOTSET_RENORMALISE_AUTO = 0, /* where HOTSET_BATCH_NORMALISED says that the model normalises its top k weights */
    HOTSET_RENORMALISE_ON   = 1,
    HOTSET_RENORMALISE_OFF  = 2
};
enum { /* hotset_params.prefill, bits: what prefill passes take part in (nothing by default) */
    HOTSET_PREFILL_RECORD = 1,
    HOTSET_PREFILL_MOCE   = 2,
    HOTSET_PREFILL_DROP   = 4
};
enum { /* level of a log line */
    HOTSET_LOG_ERROR = 0,
    HOTSET_LOG_WARN  = 1,
    HOTSET_LOG_INFO  = 2
};

/* text: one line without its newline, valid during the call. Called on the thread that called hotset; must not call hotset. */
typedef void (*hotset_log_fn)(int32_t level, const char * text, void * user);

#define HOTSET_CHUNK_BYTES 262144u /* the default of hotset_params.chunk_bytes */

struct hotset_params {
    size_t        struct_size;
    uint64_t      cache_bytes;     /* memory for slots and read staging; 0: see slots */
    uint64_t      chunk_bytes;     /* what of an expert is longer is read in parts of at most so many bytes, by several lanes; 0: nothing is cut.
                                      At least 65536. The default is HOTSET_CHUNK_BYTES */
    uint32_t      slots;           /* slots per layer; wins over cache_bytes. Both 0: half of the machine's memory, less the dense weights. At most n_experts */
    uint32_t      k;               /* experts per token; 0: the file's expert_used_count */
    uint32_t      top_m;           /* candidates recorded and reranked from, per token and layer; 0: 64. From k to the experts of the smallest layer */
    uint32_t      lanes;           /* reads in flight at most, 1..64, each with a thread of its own but where an io_uring reads; 0: 8 */
    uint32_t      read_ahead;      /* slots per layer beside the cache's, to read ahead into: see hotset_read_ahead; 0: none */
    int32_t       backing;         /* HOTSET_BACKING_* */
    int32_t       io;              /* HOTSET_IO_* */
    int32_t       read_by;         /* HOTSET_READ_BY_* */
    int32_t       dense;           /* HOTSET_DENSE_* */
    int32_t       delta;           /* HOTSET_DELTA_* */
    double        lambda;          /* MoCE: the bonus as a share of delta, >= 0; 0: off */
    uint32_t      top_j;           /* MoCE: so many of the router's first experts get the bonus resident or not */
    int32_t       renormalise;     /* HOTSET_RENORMALISE_* */
    double        drop;            /* F: a miss that weighs less than F x (sum of weights / k) does not run, >= 0; 0: off */
    uint32_t      prefill;         /* HOTSET_PREFILL_* bits */
    uint32_t      wait_ms;         /* bound of hotset_wait in milliseconds; 0: 30000 */
    uint32_t      queue_tokens;    /* recorded tokens that may wait for the disk; 0: 256. Beyond: left out, and counted */
    int32_t       policy;          /* HOTSET_POLICY_* */
    const char *  trace;           /* Q4RT file to record to (and its sidecar, "<trace>.json"), replaced; NULL: none */
    const char *  pack;            /* packed experts of this very model (`hotset pack`), read instead of its own file, which stays mapped for
                                      pass-through; with HOTSET_BACKING_SLOTS only; NULL: none */
    const char *  metrics;         /* metrics log to write, a line a pass: JSON lines, or CSV where the name ends in .csv; NULL: none */
    const char *  schedule;        /* plan file of an experiment, begun at open: see hotset_set_schedule; NULL: none */
    hotset_log_fn log;             /* NULL: silent */
    void *        log_user;
    char *        detail;          /* caller's buffer for the detail of a failing hotset_open or hotset_plan; NULL: none */
    size_t        detail_size;     /* its size in bytes, with the final 0 */
};

struct hotset_params hotset_params_default(void);

/* Lays the environment over *p: HOTSET_SLOTS, HOTSET_CACHE_BYTES (with an optional K, M or G: powers of 1024), HOTSET_LANES, HOTSET_READ_AHEAD, HOTSET_CHUNK (bytes, as
 * HOTSET_CACHE_BYTES), HOTSET_PACK,
 * HOTSET_BACKING (slots, page-cache), HOTSET_IO (direct, buffered), HOTSET_READ_BY (io_uring, threads), HOTSET_DENSE (lock, warm, leave), HOTSET_LAMBDA,
 * HOTSET_TOP_J, HOTSET_POLICY (lru, lfu, ema, near_pick_ema, inverse_router_ema), HOTSET_DELTA (token_topk, token_full, running_full), HOTSET_DROP, HOTSET_RENORMALISE (auto, on, off), HOTSET_PREFILL
 * (record, moce, drop: comma-separated), HOTSET_TOP_M, HOTSET_TRACE, HOTSET_METRICS, HOTSET_SCHEDULE. What is unset or empty stays as it is. The paths
 * point into the environment: valid until it changes. HOTSET_E_ARGUMENT names the variable in p->detail and leaves *p as it was. */
int32_t hotset_params_from_env(struct hotset_params * p);

/* ---- opening --------------------------------------------------------------------------------------------------------- */

/* Opens the model (any shard of a split one), reserves the slots, starts the I/O lanes, begins recording. *out is NULL on failure.
 * Strings are copied. HOTSET_E_BUDGET where the slots are fewer than k: the detail says what is needed. */
int32_t hotset_open(const char * gguf, const struct hotset_params * p, struct hotset ** out);

/* Writes what is still queued, ends the lanes, frees everything. No other call may be in progress or follow. NULL is fine.
 * The engine must no longer use the slots or the mapped file. */
void hotset_close(struct hotset * h);

/* Memory and slots that these settings would take, from the file's headers alone; nothing is allocated, no expert is read. */
struct hotset_plan {
    size_t   struct_size;
    uint32_t n_layers;        /* layers with experts */
    uint32_t n_experts;       /* of the layer that has most */
    uint32_t k;
    uint32_t slots;           /* per layer */
    uint32_t min_slots;       /* fewest that can be opened: k */
    uint32_t read_ahead;      /* slots per layer beside them, to read ahead into; read_ahead x slot_bytes on top of cache_bytes */
    uint64_t slot_bytes;      /* one slot in every layer, padding to pages included */
    uint64_t cache_bytes;     /* slots x slot_bytes */
    uint64_t staging_bytes;   /* read buffers of the lanes */
    uint64_t min_bytes;       /* min_slots x slot_bytes + staging_bytes: the smallest cache_bytes that opens */
    uint64_t expert_bytes;    /* all experts on disk */
    uint64_t dense_bytes;     /* everything else on disk: what the dense policy locks or warms */
    uint64_t memory_bytes;    /* of the machine */
};

int32_t hotset_plan(const char * gguf, const struct hotset_params * p, struct hotset_plan * out);

/* What is open, and which modes are in effect. */
struct hotset_shape {
    size_t       struct_size;
    uint32_t     n_layers;         /* layers with experts */
    uint32_t     n_experts;        /* of the layer that has most */
    uint32_t     k;
    uint32_t     top_m;
    uint32_t     slots;            /* per layer */
    uint32_t     lanes;            /* 0 with the page-cache backing */
    int32_t      backing;
    int32_t      io;               /* in effect, which may not be what was asked for */
    int32_t      read_by;          /* the same. With the page-cache backing HOTSET_READ_BY_THREADS, and lanes 0: nobody */
    int32_t      dense;            /* in effect */
    int32_t      delta;
    int32_t      renormalise;
    uint32_t     top_j;
    double       lambda;
    double       drop;
    uint32_t     prefill;
    uint32_t     recording;        /* 1: a trace is being written */
    uint64_t     expert_bytes;     /* one expert of the largest layer, on disk */
    uint64_t     slot_bytes;       /* one slot in every layer */
    uint64_t     cache_bytes;      /* slots x slot_bytes */
    uint64_t     staging_bytes;
    uint64_t     dense_bytes;      /* that the policy was asked to hold */
    uint64_t     dense_locked_bytes;
    uint64_t     straight_bytes;   /* of all experts on disk: what direct reads bring straight into slots */
    uint64_t     bounced_bytes;    /* and what lies out of step with its slot, and is copied once more. Both 0 where reads are buffered */
    const char * io_reason;        /* why io is what it is; owned by the handle */
    const char * read_by_reason;   /* the same for read_by */
    const char * dense_reason;     /* the same for dense */
    const char * architecture;     /* general.architecture of the file, or "" */
    int32_t      policy;
    uint32_t     read_ahead;       /* slots per layer to read ahead into, beside `slots` */
};

int32_t hotset_shape(const struct hotset * h, struct hotset_shape * out);

/* The block numbers of the layers with experts, ascending: up to n of them into out (NULL where n is 0). Returns how many there are. */
int32_t hotset_blocks(const struct hotset * h, uint32_t * out, size_t n);

enum { /* hotset_bank.projection, hotset_wait */
    HOTSET_GATE    = 0,
    HOTSET_UP      = 1,
    HOTSET_GATE_UP = 2,
    HOTSET_DOWN    = 3,
    HOTSET_ALL     = 255
};
enum { /* hotset_bank.part: the matrix, or a companion that the same ids pick */
    HOTSET_WEIGHT = 0,
    HOTSET_BIAS   = 1,
    HOTSET_SCALE  = 2
};

/* One expert tensor of a layer: where its experts are in the slots, and where in the mapped file. */
struct hotset_bank {
    size_t       struct_size;  /* of out[0]: also the distance from one element of the array to the next */
    const char * name;         /* in the file; owned by the handle */
    int32_t      projection;
    int32_t      part;
    uint32_t     ggml_type;    /* ggml's type number */
    uint32_t     slots;        /* slot numbers that hotset_admit may give are below this (n_experts; which of them hold memory changes) */
    uint64_t     slice_bytes;  /* one expert; also the distance from one expert to the next in the mapped file */
    uint64_t     stride_bytes; /* from one slot to the next; a multiple of the page size. 0 with the page-cache backing */
    void *       base;         /* slot 0. Written by hotset's lanes; NULL with the page-cache backing */
    const void * mapped;       /* expert 0 in the mapped file, read only */
};

/* Up to n banks of a layer into out, weights first. Returns how many there are, or an error. */
int32_t hotset_banks(struct hotset * h, uint32_t layer, struct hotset_bank * out, size_t n);

/* ---- per MoE layer --------------------------------------------------------------------------------------------------- */

enum { /* hotset_batch.phase */
    HOTSET_DECODE  = 0,
    HOTSET_PREFILL = 1
};
enum { /* hotset_batch.score_space: what the scores are */
    HOTSET_SCORES_LOGITS  = 0, /* recorded as they are */
    HOTSET_SCORES_SOFTMAX = 1, /* softmax probabilities: their logarithm is recorded, which is the logit less a constant per token */
    HOTSET_SCORES_LINEAR  = 2  /* other numbers that rank experts and are proportional to weight (sigmoid, biased probabilities) */
};
enum { /* hotset_batch.flags, bits */
    HOTSET_BATCH_ROUTED     = 1, /* hotset_select: ids holds the router's own choice, by falling score */
    HOTSET_BATCH_NORMALISED = 2, /* the model scales its top k weights to a fixed sum */
    HOTSET_BATCH_TAIL       = 4  /* where this layer has fewer tokens than the pass began with, they are its last ones */
};

struct hotset_batch {
    size_t   struct_size;
    uint32_t layer;        /* block number */
    uint32_t n_tokens;     /* rows; 0 is legal, and does nothing */
    uint32_t n_experts;    /* must be the layer's */
    uint32_t k;            /* ids per row; at most what the handle was opened with */
    int32_t  phase;        /* HOTSET_DECODE, HOTSET_PREFILL; of the pass: that of its first call counts */
    int32_t  score_space;  /* HOTSET_SCORES_*; hotset_select and hotset_layer only */
    uint32_t flags;        /* HOTSET_BATCH_* */
    uint32_t reserved;     /* 0 */
    int64_t  position;     /* of the pass's first token in its sequence, for the sidecar; -1: unknown */
};

struct hotset_batch hotset_batch_default(void);

/* What a call did to one layer of a batch. */
struct hotset_outcome {
    size_t   struct_size;
    int32_t  placement;       /* HOTSET_OK: ids are slots (page-cache backing: experts). HOTSET_PASS_THROUGH: ids are experts */
    uint32_t hits;            /* routed experts that were resident */
    uint32_t misses;          /* that are being read */
    uint32_t dropped;         /* that do not run */
    uint32_t swapped;         /* that reranking put in another's place (hotset_layer; hotset_admit: of the hotset_select before it) */
    uint32_t reserved;
    uint64_t read_bytes;      /* of the experts being read */
    double   mass_dropped;    /* sum over tokens of the share of routing weight that dropping lost, 0..n_tokens */
    double   mass_swapped;    /* the same for reranking: share of the router's own top k mass */
};

/* Candidates and reranking.
 * scores:     n_tokens rows of n_experts selection scores.
 * ids:        n_tokens rows of k; out: the experts to run. In, with HOTSET_BATCH_ROUTED: the router's own (what it chose stays where scores are
 *             bad: a NaN in the row, a NaN or infinity among the top k, all equal; those rows are counted in hotset_stats.bad_rows).
 * Call it before the routing weights are made, since they must be those of the experts that run. */
int32_t hotset_select(struct hotset * h, const struct hotset_batch * batch, const float * scores, size_t row_stride,
                      int32_t * ids, size_t id_stride);

/* Dropping, admission, the start of reads.
 * ids:        n_tokens rows of k. In: expert ids. Out: slots (HOTSET_OK), or unchanged (HOTSET_PASS_THROUGH: the batch uses more
 *             experts than there are slots; the cache is as it was). With HOTSET_PASS_THROUGH the experts are in the mapped file. So they are
 *             in a schedule's page-cache cell, too: there ids stay expert ids, a dropped place's becomes its stand-in's.
 * weights:    n_tokens rows of k, the final routing weights, changed where experts are dropped. NULL: nothing is dropped.
 * outcome:    filled in; NULL is fine.
 * A dropped expert's place gets weight 0 and the slot of a resident expert that its token does not use otherwise: ids stay distinct.
 * Returns with reads in flight: hotset_wait before computing. An error leaves ids and weights as they were. */
int32_t hotset_admit(struct hotset * h, const struct hotset_batch * batch, int32_t * ids, size_t id_stride,
                     float * weights, size_t w_stride, struct hotset_outcome * outcome);

/* Until the bytes of a slot are there. slot: as hotset_admit gave it, or -1 for all of the layer. projection: HOTSET_GATE ... (with its
 * companions), or HOTSET_ALL; with slot -1 all projections are waited for. Fast where nothing is in flight. Bounded by hotset_params.wait_ms. On an error the
 * slot's bytes must not be used, and its expert is a miss again. */
int32_t hotset_wait(struct hotset * h, uint32_t layer, int32_t slot, uint32_t projection);

/* hotset_wait without the wait: HOTSET_IN_FLIGHT where it would wait, else what it would return. Two loads where nothing is in flight. An
 * engine computes with what is there first, and lets a layer without misses pass uninterrupted. */
int32_t hotset_ready(struct hotset * h, uint32_t layer, int32_t slot, uint32_t projection);

/* Tells which experts (n ids, the likeliest first) a layer is likely to want soon: those that are not resident are read on lanes that have nothing else to
 * do, into slots set aside (hotset_params.read_ahead; without any, and with the page-cache backing, it does nothing). One that is then admitted is a miss
 * as it would have been, whose read began earlier; one that is not, or not soon, is overwritten by a later guess. Nothing that is computed changes. Between
 * the calls of two layers, as hotset_select; never waits. Returns how many reads were started. */
int32_t hotset_read_ahead(struct hotset * h, uint32_t layer, const int32_t * experts, size_t n);

/* hotset_select, a softmax over the chosen scores (logits; for other score spaces the scores normalised to sum 1), and hotset_admit
 * in one, for an engine without a graph. ids and weights: out (ids in, too, with HOTSET_BATCH_ROUTED). */
int32_t hotset_layer(struct hotset * h, const struct hotset_batch * batch, const float * scores, size_t row_stride,
                     int32_t * ids, size_t id_stride, float * weights, size_t w_stride, struct hotset_outcome * outcome);

/* ---- at any time: taken up at once between passes, by the next pass within one ---------------------------------------- */

int32_t hotset_set_drop(struct hotset * h, double drop, int32_t renormalise);
int32_t hotset_set_moce(struct hotset * h, double lambda, uint32_t top_j, int32_t delta);

/* As hotset_params.cache_bytes and .slots. A smaller cache gives its memory back, oldest experts first. HOTSET_E_BUDGET below k slots. */
int32_t hotset_set_cache_bytes(struct hotset * h, uint64_t cache_bytes);
int32_t hotset_set_slots(struct hotset * h, uint32_t slots);

/* Runs an experiment within the decode: the plan file (JSON: cells of settings, blocks of decode tokens; docs/design.md describes it) says which
 * settings hold for which tokens, counted from here on. They lie over what the calls above have set, change between passes, and label each row
 * of the metrics log with cell and block. hotset_shape says what the next pass will have. NULL (or "") ends it: what the calls above
 * have set holds again. hotset_reset does not touch it. HOTSET_E_IO, HOTSET_E_FORMAT (file, line and reason in the detail), HOTSET_E_BUDGET where
 * a cell has fewer slots than k or more than were planned at open, HOTSET_E_ARGUMENT where it has more lanes, or slots where there
 * are none; then nothing changes. A schedule in hotset_params opens the lanes, and the slots, that its cells need. */
int32_t hotset_set_schedule(struct hotset * h, const char * path);

/* Forgets what is resident, and begins the statistics anew. Not while the engine computes: what it still has of slots is void. A pass
 * that was cut off (an aborted decode) is ended by it. */
int32_t hotset_reset(struct hotset * h);

/* Since the handle was opened or reset. */
struct hotset_stats {
    size_t   struct_size;
    uint64_t passes;
    uint64_t aborted_passes;     /* cut off before their last layer */
    uint64_t decode_tokens;      /* tokens of decode passes, as the first layer saw them */
    uint64_t prefill_tokens;
    uint64_t pass_through_rows;  /* rows of batches that did not fit, over all layers */
    uint64_t hits, misses, dropped, swapped; /* routed experts, over all layers and tokens that went through slots */
    double   mass_dropped;       /* sums of hotset_outcome's */
    double   mass_swapped;
    uint64_t bad_rows;           /* rows that were not reranked because of their scores */
    uint64_t read_bytes;         /* of experts */
    uint64_t device_bytes;       /* read for them, alignment included */
    uint64_t reads;
    uint64_t failed_reads;
    uint64_t wait_ns;            /* spent in hotset_wait and hotset_admit waiting for reads */
    uint64_t resident;           /* experts, over all layers */
    uint64_t resident_bytes;     /* memory that slots and staging hold now */
    uint64_t recorded_tokens;
    uint64_t left_out_tokens;    /* that the recorder left out; the sidecar says why */
    uint64_t lost_metrics;       /* metrics rows that found the queue full */
    uint64_t ahead_issued;       /* experts whose read was started ahead */
    uint64_t ahead_adopted;      /* of them, those that were wanted while they were there */
    uint64_t ahead_wasted_bytes; /* of those that were overwritten unwanted */
};

int32_t hotset_stats(struct hotset * h, struct hotset_stats * out);

/* Hits, misses and drops of one layer; any of the pointers may be NULL. */
int32_t hotset_layer_stats(struct hotset * h, uint32_t layer, uint64_t * hits, uint64_t * misses, uint64_t * dropped);

/* Until everything recorded so far is in the files. timeout_ms 0: 30000. HOTSET_E_IO where the disk refused, HOTSET_E_STATE
 * where neither trace nor metrics are written. */
int32_t hotset_trace_flush(struct hotset * h, uint32_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif /* HOTSET_H */
