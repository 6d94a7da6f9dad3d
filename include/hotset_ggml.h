/* hotset_ggml.h - hotset for an engine built on ggml (llama.cpp and its forks), by the scheduler's eval callback.
 *
 * Compile src/ggml/hotset_ggml.c in the engine's own build, against its own ggml headers (ggml.h, ggml-backend.h, ggml-backend-impl.h),
 * and link libhotset.a. No change to the engine's sources is needed:
 *
 *     struct hotset * h;              hotset_open(path, &params, &h);
 *     struct hotset_ggml * g;         hotset_ggml_init(h, NULL, &g);
 *     struct llama_model_tensor_buft_override experts[] = { { HOTSET_GGML_EXPERTS, hotset_ggml_buffer_type(g) }, { NULL, NULL } };
 *     model_params.tensor_buft_overrides = experts;
 *     model_params.load_mode             = LLAMA_LOAD_MODE_MMAP;
 *     model_params.use_extra_bufts       = false;      // no repacking
 *     context_params.cb_eval             = hotset_ggml_eval;     context_params.cb_eval_user_data    = g;
 *     context_params.abort_callback      = hotset_ggml_aborted;  context_params.abort_callback_data  = g;
 *
 * and at the end, in this order: llama_free, llama_model_free, hotset_ggml_free, hotset_close.
 *
 * What it does in a graph, per MoE layer N:
 *   ffn_moe_topk-N              a stop, where reranking, recording or the policy needs the scores: hotset_select
 *   end of the weights' chain   a stop: the last of ffn_moe_weights, _softmax, _norm, _scaled; learned from the first graph
 *   the first MUL_MAT_ID        asked for, not yet computed: hotset_admit, and the expert tensors are pointed at the slots, or at the
 *                               mapped file for a batch that passes through
 *   each MUL_MAT_ID             waits for its own projection; it is a stop where a later one's reads are in flight. A layer without misses
 *                               is not interrupted
 * With hotset_params.read_ahead > 0: after the admission of a decode's layer, the next layer's router (its gate tensor, in f32) is applied to this layer's
 * input, and what it would choose is told to hotset_read_ahead.
 * Errors: the tensors are pointed at the mapped file and the ids put back, so that nothing wrong can be computed, and
 * hotset_ggml_aborted tells the engine to abort; llama_decode then returns 2. hotset_ggml_status and _error say why.
 *
 * The CPU backend is what this has been run on. Tensors outside of host memory are refused with an error.
 */
#ifndef HOTSET_GGML_H
#define HOTSET_GGML_H

#include <stdbool.h>

#include "ggml.h"
#include "ggml-backend.h"
#include "hotset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For llama_model_tensor_buft_override.pattern: the expert tensors and their companions. */
#define HOTSET_GGML_EXPERTS "blk\\.[0-9]+\\.ffn_(gate|up|down|gate_up)_exps\\.(weight|bias|scale)"

struct hotset_ggml; /* the adapter of one llama_context: opaque */

enum { HOTSET_GGML_PHASE_AUTO = -1 }; /* prefill where the first MoE layer of a pass sees more than one token */

enum { /* hotset_ggml_params.wait: when the bytes of a layer's experts are waited for */
    HOTSET_GGML_WAIT_LATEST     = 0, /* each expert inside of its matmul, where the engine calls hotset_ggml_rows; else by projection */
    HOTSET_GGML_WAIT_PROJECTION = 1, /* gate, up and down each before its own matmul: reads go on behind those before it */
    HOTSET_GGML_WAIT_LAYER      = 2  /* all of the layer before its first matmul: nothing is hidden */
};

struct hotset_ggml_params {
    size_t  struct_size;
    int32_t phase;        /* HOTSET_GGML_PHASE_AUTO, HOTSET_DECODE, HOTSET_PREFILL */
    int32_t wait;         /* HOTSET_GGML_WAIT_* */
    bool    tail_outputs; /* only the last tokens of a batch have outputs, so where the last layer sees fewer tokens they are the last ones */
    ggml_backend_sched_eval_callback chain; /* another callback, still called for every node; NULL: none. At the expert matmuls it sees slots for ids */
    void *  chain_user;
};

struct hotset_ggml_params hotset_ggml_params_default(void);

/* h: must outlive the adapter. p: NULL for the defaults. */
int32_t hotset_ggml_init(struct hotset * h, const struct hotset_ggml_params * p, struct hotset_ggml ** out);

/* After the model and the context that used it are freed. NULL is fine. */
void hotset_ggml_free(struct hotset_ggml * g);

/* A buffer type for the expert tensors: takes them over without loading a byte and points them at hotset's mapping of the file. Load with mmap.
 * Owned by the adapter. It is an error (hotset_ggml_status, at the first pass) if the tensors are not those of the open model. */
ggml_backend_buffer_type_t hotset_ggml_buffer_type(struct hotset_ggml * g);

/* The ggml_backend_sched_eval_callback; user: the adapter. */
bool hotset_ggml_eval(struct ggml_tensor * t, bool ask, void * user);

/* The ggml_abort_callback; data: the adapter. True from the first error until hotset_ggml_clear. */
bool hotset_ggml_aborted(void * data);

/* For an engine whose MUL_MAT_ID asks for an expert's rows before it uses them (vendor/llama.cpp has the patch for ggml's CPU backend). node: the
 * MUL_MAT_ID; id: one of its ids. Returns the address of row 0 of that matrix, as node->src[0] has it or, where its read has failed, elsewhere; or NULL
 * if its bytes are not there and wait is false: compute with others first, then ask again with true. Never NULL with true. Any thread, any number at
 * once. Tensors that are not hotset's get their own address. */
const void * hotset_ggml_rows(const struct ggml_tensor * node, int64_t id, bool wait);

/* The first error since the last clear, HOTSET_OK without one; and its detail, owned by the adapter, or "". */
int32_t      hotset_ggml_status(const struct hotset_ggml * g);
const char * hotset_ggml_error(const struct hotset_ggml * g);
void         hotset_ggml_clear(struct hotset_ggml * g);

/* Between decodes: the phase of the next passes, and the position of the next pass's first token (-1: unknown; kept count of from then on). */
void hotset_ggml_set_phase(struct hotset_ggml * g, int32_t phase);
void hotset_ggml_set_position(struct hotset_ggml * g, int64_t position);

/* How often the scheduler was stopped: two a layer with reranking or recording, one without; and up to two more in a layer with reads in flight. */
uint64_t hotset_ggml_stops(const struct hotset_ggml * g);

#ifdef __cplusplus
}
#endif

#endif /* HOTSET_GGML_H */
