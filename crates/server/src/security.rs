//! Who may ask.

use axum::http::{HeaderMap, HeaderValue, Method, header};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::ApiError;

/// Who may ask.
#[derive(Clone, Default)]
pub struct Access {
    /// The digest of the key every request has to show; `None` asks for none.
    key: Option<[u8; 32]>,
    /// Origins of web pages that may ask; `*` is any.
    origins: Vec<String>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("key", &self.key.is_some()).field("origins", &self.origins).finish()
    }
}

impl Access {
    /// Requests must show `key`, if there is one. Web pages may ask if their origin is among `origins`.
    pub fn new(key: Option<&str>, origins: Vec<String>) -> Access {
        Access { key: key.map(|key| Sha256::digest(key).into()), origins }
    }

    /// Whether these headers show the key. The time it takes does not depend on how much of it is right.
    pub(crate) fn check_key(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(key) = &self.key else { return Ok(()) };
        let bearer =
            headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().split_at_checked(7));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer ")).map(|(_, key)| key);
        let shown =
            bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes)).unwrap_or_default();
        let shown: [u8; 32] = Sha256::digest(shown.trim_ascii()).into();
        if bool::from(shown.ct_eq(key)) { Ok(()) } else { Err(ApiError::key()) }
    }

    /// The origin to name in the answer to a web page; `None` if no web page asks.
    pub(crate) fn check_origin(&self, headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(None) };
        let allowed = self.origins.iter().any(|known| known == "*" || known.as_bytes() == origin.as_bytes());
        if allowed { Ok(Some(origin.clone())) } else { Err(ApiError::origin()) }
    }
}

/// Lets the web page of `origin` read the answer.
pub(crate) fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("origin"));
    let methods = HeaderValue::from_static("GET, POST, OPTIONS");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    let names = HeaderValue::from_static("authorization, content-type, x-api-key");
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
}

/// Whether a web page only asks if it may ask.
pub(crate) fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}
