/* hotset in a llama.cpp fork: a greedy decode in which only the marked lines are hotset's. README.md shows these lines; a test of bench/llama
 * compiles and runs this file.
 *
 *     recipe MODEL.gguf PROMPT N_TOKENS        settings: HOTSET_SLOTS=16, HOTSET_TRACE=out.q4rt, ... (hotset.h)
 *
 * Build: cc, with src/ggml/hotset_ggml.c, -Iinclude, the fork's include, ggml/include and ggml/src; link libhotset.a and the fork's libraries.
 */
#include "hotset.h"      /* hotset */
#include "hotset_ggml.h" /* hotset */
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void quiet(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static int fail(const char * what, const char * why) {
    fprintf(stderr, "recipe: %s: %s\n", what, why);
    return 1;
}

int main(int argc, char ** argv) {
    if (argc != 4) return fail("usage", "recipe MODEL.gguf PROMPT N_TOKENS");
    const char * path = argv[1], * prompt = argv[2];
    const int    n_predict = atoi(argv[3]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params   mp = llama_model_default_params();
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx     = 512;
    cp.n_threads = cp.n_threads_batch = 1;

    /* ---- hotset: before the model is loaded ---- */
    char                 detail[512] = "";
    struct hotset *      hot = NULL;
    struct hotset_ggml * glue = NULL;
    struct hotset_params hp = hotset_params_default();
    hp.detail = detail, hp.detail_size = sizeof detail;
    if (hotset_params_from_env(&hp) != HOTSET_OK || hotset_open(path, &hp, &hot) != HOTSET_OK) return fail("hotset", detail);
    if (hotset_ggml_init(hot, NULL, &glue) != HOTSET_OK) return fail("hotset", hotset_last_error(hot));
    const struct llama_model_tensor_buft_override experts[] = { { HOTSET_GGML_EXPERTS, hotset_ggml_buffer_type(glue) }, { NULL, NULL } };
    mp.tensor_buft_overrides = experts;
    mp.load_mode             = LLAMA_LOAD_MODE_MMAP;
    mp.use_extra_bufts       = false;
    cp.cb_eval               = hotset_ggml_eval, cp.cb_eval_user_data = glue;
    cp.abort_callback        = hotset_ggml_aborted, cp.abort_callback_data = glue;
    /* ---- hotset: end ---- */

    struct llama_model * model = llama_model_load_from_file(path, mp);
    if (model == NULL) return fail(path, "cannot be loaded");
    struct llama_context *     ctx = llama_init_from_model(model, cp);
    const struct llama_vocab * vocab = llama_model_get_vocab(model);
    llama_token                tokens[512];
    int32_t                    n = llama_tokenize(vocab, prompt, (int32_t) strlen(prompt), tokens, 512, true, false);
    if (ctx == NULL || n <= 0 || n + n_predict > 512) return fail("prompt", "no context, or prompt and tokens do not fit 512");

    int failed = 0;
    for (int i = 0; i < n_predict; i++) {
        if (llama_decode(ctx, llama_batch_get_one(tokens, n)) != 0) {
            /* hotset: the decode was aborted, nothing wrong was computed; the reason is here */
            failed = fail("decode", hotset_ggml_status(glue) != HOTSET_OK ? hotset_ggml_error(glue) : "llama_decode failed");
            break;
        }
        const float * logits = llama_get_logits_ith(ctx, -1);
        tokens[0] = 0, n = 1;
        for (llama_token t = 1; t < llama_vocab_n_tokens(vocab); t++)
            if (logits[t] > logits[tokens[0]]) tokens[0] = t;
        char    piece[64];
        int32_t length = llama_token_to_piece(vocab, tokens[0], piece, sizeof piece, 0, false);
        if (length > 0) fwrite(piece, 1, (size_t) length, stdout);
    }
    putchar('\n');

    struct hotset_stats s = { .struct_size = sizeof s };                                /* hotset */
    hotset_stats(hot, &s);                                                              /* hotset */
    fprintf(stderr, "hits %llu, misses %llu, bytes read %llu\n", (unsigned long long) s.hits, (unsigned long long) s.misses, (unsigned long long) s.read_bytes);

    llama_free(ctx);
    llama_model_free(model);
    hotset_ggml_free(glue); /* hotset: after context and model */
    hotset_close(hot);      /* hotset */
    llama_backend_free();
    return failed;
}
