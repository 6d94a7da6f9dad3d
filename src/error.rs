//! One error for the whole library: a kind, which the C ABI turns into a status code, and a detail, which
//! carries the numbers (file, tensor, layer, expert, offset, wanted, found) for the person who reads it.

use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, one per negative status code of `hotset.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A null pointer, an unknown enum value, a stride or size that cannot be.
    Argument,
    /// A layer, expert, slot or projection that the model does not have, or an id twice in one token.
    Range,
    /// The system refused a file operation or a read.
    Io,
    /// A file is not what its format says.
    Format,
    /// The file is sound, but not a model whose experts can be kept in slots.
    Model,
    /// A file changed while it was in use, or is not the one it was made for.
    Changed,
    /// The settings need more memory, or more slots, than they allow.
    Budget,
    /// The system has no memory left.
    Memory,
    /// A call that is not possible in this state.
    State,
    /// A bounded wait ran out.
    Timeout,
    /// A bug in hotset: caught, nothing was changed that the detail does not name.
    Internal,
}

#[derive(Clone, Debug)]
pub struct Error {
    pub kind: ErrorKind,
    pub detail: String,
}

impl Error {
    pub fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Error {}

/// `err!(Kind, "format", args)`: an [`Error`] of that kind.
macro_rules! err {
    ($kind:ident, $($arg:tt)+) => {
        $crate::error::Error::new($crate::error::ErrorKind::$kind, format!($($arg)+))
    };
}
pub(crate) use err;
