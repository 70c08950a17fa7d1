//! What a client is told when a request fails.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};

/// An error as clients of the OpenAI dialect know it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The field at fault.
    param: Option<String>,
    /// Further fields of the error object.
    more: Vec<(&'static str, Json)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, kind, message: message.into(), param: None, more: Vec::new() }
    }

    /// 400 for a field.
    pub fn field(name: &str, message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        ApiError { param: Some(name.to_owned()), ..error }
    }

    /// 400 for the whole request.
    pub fn request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 404.
    pub fn not_found(what: &str) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", format!("{what} does not exist here"))
    }

    /// 401.
    pub fn key() -> ApiError {
        let message = "the API key is missing or wrong: send `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
    }

    /// 403 for a web page.
    pub fn origin() -> ApiError {
        let message = "requests from web pages are refused unless the server was started with their origin";
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 413.
    pub fn too_large(limit: usize) -> ApiError {
        let message = format!("the body is larger than {limit} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// 408.
    pub fn slow() -> ApiError {
        ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            "the body took too long to arrive",
        )
    }

    /// 429 with `Retry-After`.
    pub fn busy(waiting: usize) -> ApiError {
        let message = format!("{waiting} requests are waiting already; try again later");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    /// 503: the engine has stopped.
    pub fn stopped() -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "the engine has stopped")
    }

    /// 400 in the words by which agents know that a conversation has to be shortened.
    pub fn overflow(prompt: usize, context: usize) -> ApiError {
        let message = format!(
            "the request of {prompt} tokens exceeds the available context size ({context} tokens); \
             shorten the conversation or start the server with a larger --context"
        );
        let error = ApiError::new(StatusCode::BAD_REQUEST, "exceed_context_size_error", message);
        ApiError { more: vec![("n_prompt_tokens", json!(prompt)), ("n_ctx", json!(context))], ..error }
    }

    /// The body.
    pub fn json(&self) -> Json {
        let mut error = json!({
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status.as_u16(),
        });
        for (key, value) in &self.more {
            error[*key] = value.clone();
        }
        json!({ "error": error })
    }
}

impl From<engine::Error> for ApiError {
    fn from(error: engine::Error) -> ApiError {
        match error {
            engine::Error::ContextOverflow { needed, context } => ApiError::overflow(needed, context),
            engine::Error::Setting { name, .. } => {
                ApiError::field(&name.replace('-', "_"), error.to_string())
            }
            engine::Error::Constraint { .. } => ApiError::request(error.to_string()),
            engine::Error::EmptyPrompt => ApiError::field("prompt", error.to_string()),
            error => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.json())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
