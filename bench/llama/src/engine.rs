//! llama.cpp with one model and one context, alone or with hotset in it, as one value: whatever happens, things are freed in the order
//! that hotset_ggml.h asks for.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use llama_cpp_sys_2 as llama;

use crate::args::{HookArgs, Load};
use crate::ffi;
use crate::hook::{Hook, c_path, text};
use crate::lazy_map;

pub type Token = llama::llama_token;

/// Which tokens of a batch need logits. Both let hotset assume that the last tokens are those with outputs.
#[derive(Clone, Copy, PartialEq)]
pub enum Logits {
    Last,
    All,
}

pub struct Engine {
    pub hook: Option<Hook>,
    pub n_ctx: u32,
    pub load_time: Duration,
    model: *mut llama::llama_model,
    ctx: *mut llama::llama_context,
    vocab: *const llama::llama_vocab,
    n_vocab: usize,
    /// llama.cpp keeps the pointer for the model's life.
    overrides: Box<[llama::llama_model_tensor_buft_override; 2]>,
}

impl Engine {
    pub fn open(load: &Load, args: &HookArgs) -> Result<Engine> {
        let start = Instant::now();
        // SAFETY: both take no state of ours; the callback is a static function.
        unsafe {
            llama::llama_log_set(Some(engine_log), ptr::without_provenance_mut(usize::from(load.verbose)));
            llama::llama_backend_init();
        }
        let hook = if args.no_hook { None } else { Some(Hook::open(&load.model, args, load.verbose)?) };
        let overrides = Box::new([
            llama::llama_model_tensor_buft_override {
                pattern: ffi::HOTSET_GGML_EXPERTS.as_ptr(),
                buft: hook.as_ref().map_or(ptr::null_mut(), Hook::buffer_type),
            },
            llama::llama_model_tensor_buft_override { pattern: ptr::null(), buft: ptr::null_mut() },
        ]);
        let mut engine = Engine {
            hook,
            n_ctx: 0,
            load_time: Duration::ZERO,
            model: ptr::null_mut(),
            ctx: ptr::null_mut(),
            vocab: ptr::null(),
            n_vocab: 0,
            overrides,
        };
        engine.load_model(load)?;
        engine.make_context(load)?;
        if let (true, Some(hook)) = (args.poison, &engine.hook) {
            hook.poison()?;
        }
        engine.load_time = start.elapsed();
        Ok(engine)
    }

    fn load_model(&mut self, load: &Load) -> Result<()> {
        // SAFETY: no arguments.
        let mut params = unsafe { llama::llama_model_default_params() };
        // The same with and without hotset, so that runs differ in nothing else.
        params.n_gpu_layers = 0;
        params.load_mode = llama::LLAMA_LOAD_MODE_MMAP;
        params.use_extra_bufts = false;
        if self.hook.is_some() {
            params.tensor_buft_overrides = self.overrides.as_ptr();
        }
        let path = c_path(&load.model)?;
        // Without hotset the engine is left as it is, hints and all.
        let _lazy = self.hook.as_ref().map(|_| lazy_map::Lazy::begin());
        // SAFETY: path and params are valid for the call, the overrides as long as self.
        self.model = unsafe { llama::llama_model_load_from_file(path.as_ptr(), params) };
        if self.model.is_null() {
            bail!("llama.cpp cannot load {}: {}", load.model.display(), complaints());
        }
        // SAFETY: the model is loaded; the vocabulary is part of it.
        unsafe {
            self.vocab = llama::llama_model_get_vocab(self.model);
            self.n_vocab = llama::llama_vocab_n_tokens(self.vocab).max(0) as usize;
        }
        Ok(())
    }

    fn make_context(&mut self, load: &Load) -> Result<()> {
        // SAFETY: the model is loaded.
        let trained = unsafe { llama::llama_model_n_ctx_train(self.model) }.max(2) as u32;
        // SAFETY: no arguments.
        let mut params = unsafe { llama::llama_context_default_params() };
        params.n_ctx = load.ctx.unwrap_or(trained.min(4096));
        // A whole prompt in one llama_decode, which cuts it up into micro-batches itself.
        params.n_batch = params.n_ctx.max(load.ubatch);
        params.n_ubatch = load.ubatch;
        params.n_threads = i32::from(load.threads);
        params.n_threads_batch = i32::from(load.threads);
        params.no_perf = true;
        if let Some(hook) = &self.hook {
            params.cb_eval = Some(ffi::hotset_ggml_eval);
            params.cb_eval_user_data = hook.adapter();
            params.abort_callback = Some(ffi::hotset_ggml_aborted);
            params.abort_callback_data = hook.adapter();
        }
        // SAFETY: the model is loaded, the adapter outlives the context.
        self.ctx = unsafe { llama::llama_init_from_model(self.model, params) };
        if self.ctx.is_null() {
            bail!("llama.cpp cannot make a context of {} tokens: {}", params.n_ctx, complaints());
        }
        // SAFETY: the context exists.
        self.n_ctx = unsafe { llama::llama_n_ctx(self.ctx) };
        Ok(())
    }

    /// With the model's beginning of text where it has one.
    pub fn tokenize(&self, text: &[u8]) -> Result<Vec<Token>> {
        let len = i32::try_from(text.len()).map_err(|_| anyhow!("{} bytes are too long a text", text.len()))?;
        let mut tokens: Vec<Token> = vec![0; text.len() + 2];
        loop {
            let (room, to) = (tokens.len() as i32, tokens.as_mut_ptr());
            // SAFETY: text and tokens are as long as said. Special tokens are added, but not read out of the text.
            let n = unsafe { llama::llama_tokenize(self.vocab, text.as_ptr().cast(), len, to, room, true, false) };
            match n {
                i32::MIN => bail!("the text makes more tokens than 31 bits count"),
                0.. => {
                    tokens.truncate(n as usize);
                    return Ok(tokens);
                }
                // So many are needed.
                _ => tokens.resize(n.unsigned_abs() as usize, 0),
            }
        }
    }

    /// The bytes that a token stands for: not always whole characters.
    pub fn piece(&self, token: Token) -> Vec<u8> {
        let mut bytes = vec![0u8; 64];
        loop {
            let (room, to) = (bytes.len() as i32, bytes.as_mut_ptr().cast());
            // SAFETY: bytes is as long as said.
            let n = unsafe { llama::llama_token_to_piece(self.vocab, token, to, room, 0, false) };
            if n >= 0 {
                bytes.truncate(n as usize);
                return bytes;
            }
            bytes.resize(n.unsigned_abs() as usize, 0);
        }
    }

    pub fn is_end(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_is_eog(self.vocab, token) }
    }

    /// The beginning of text, if the model is to see one.
    pub fn bos(&self) -> Option<Token> {
        // SAFETY: as above.
        unsafe { llama::llama_vocab_get_add_bos(self.vocab).then(|| llama::llama_vocab_bos(self.vocab)) }
    }

    /// Appends the tokens to the sequence. `prefill`: the phase that hotset is told.
    pub fn decode(&mut self, tokens: &[Token], logits: Logits, prefill: bool) -> Result<()> {
        if let Some(hook) = &self.hook {
            hook.set_phase(prefill);
        }
        let mut tokens = tokens.to_vec();
        let mut wanted = vec![1i8; tokens.len()];
        let batch = llama::llama_batch {
            n_tokens: tokens.len() as i32,
            token: tokens.as_mut_ptr(),
            embd: ptr::null_mut(),
            // NULL: positions go on from the memory's last, all in sequence 0.
            pos: ptr::null_mut(),
            n_seq_id: ptr::null_mut(),
            seq_id: ptr::null_mut(),
            // NULL: the last token's alone.
            logits: if logits == Logits::All { wanted.as_mut_ptr() } else { ptr::null_mut() },
        };
        // SAFETY: the context exists, the batch's arrays live until after the call.
        let status = unsafe { llama::llama_decode(self.ctx, batch) };
        if let Some(error) = self.hook.as_ref().and_then(Hook::error) {
            bail!("hotset: {error}");
        }
        match status {
            0 => Ok(()),
            1 => bail!("the context of {} tokens is full", self.n_ctx),
            2 => bail!("the decode was aborted"),
            other => bail!("llama_decode failed with {other}: {}", complaints()),
        }
    }

    /// Of the batch's i-th token; -1: of the last. Only where the last decode asked for them.
    pub fn logits(&mut self, i: i32) -> Result<&[f32]> {
        // SAFETY: the context exists; the call waits for the computation to end.
        let data = unsafe { llama::llama_get_logits_ith(self.ctx, i) };
        if data.is_null() {
            bail!("the engine has no logits for token {i} of the batch");
        }
        // SAFETY: a row has n_vocab floats, and stays until the next decode, which needs self mutably.
        Ok(unsafe { std::slice::from_raw_parts(data, self.n_vocab) })
    }

    /// Forgets the sequence, not what is resident.
    pub fn restart(&mut self) {
        // SAFETY: the context exists, nothing is being decoded.
        unsafe { llama::llama_memory_clear(llama::llama_get_memory(self.ctx), true) };
        if let Some(hook) = &self.hook {
            hook.set_position(0);
        }
    }

    /// Words of the vocabulary: logits of a token.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// "qwen3moe 30B.A3B Q2_0", or so.
    pub fn description(&self) -> String {
        let mut buffer = [0 as c_char; 128];
        // SAFETY: the model is loaded, the buffer as long as said and zero-terminated by the callee.
        unsafe {
            llama::llama_model_desc(self.model, buffer.as_mut_ptr(), buffer.len());
            text(buffer.as_ptr())
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: each is NULL or alive, and used by nobody; the hook, a field, is dropped after this.
        unsafe {
            if !self.ctx.is_null() {
                llama::llama_free(self.ctx);
            }
            if !self.model.is_null() {
                llama::llama_model_free(self.model);
            }
        }
    }
}

/// What llama.cpp complained about: its functions themselves say only that they failed.
static COMPLAINTS: Mutex<String> = Mutex::new(String::new());

fn complaints() -> String {
    let text = COMPLAINTS.lock().map(|text| text.clone()).unwrap_or_default();
    if text.is_empty() { "no reason given (try --verbose)".to_string() } else { text }
}

/// SAFETY: called by llama.cpp only, with a C string.
unsafe extern "C" fn engine_log(level: llama::ggml_log_level, line: *const c_char, user: *mut c_void) {
    // SAFETY: valid during the call.
    let line = unsafe { text(line) };
    if user.addr() != 0 {
        eprint!("{line}");
    }
    if level != llama::GGML_LOG_LEVEL_ERROR {
        return;
    }
    if let Ok(mut all) = COMPLAINTS.lock() {
        // The first says most; a loop of complaints must not fill the memory.
        if all.len() < 1000 {
            let between = if all.is_empty() { "" } else { "; " };
            all.push_str(between);
            all.push_str(line.trim());
        }
    }
}
