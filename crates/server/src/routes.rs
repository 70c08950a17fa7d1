//! The endpoints.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value as Json, json};

use crate::error::ApiError;
use crate::security::{Access, allow, is_preflight};
use crate::service::Service;
use crate::{chat, completions, info};

/// Most bytes of a request: a context of a million tokens several times over.
const BODY: usize = 32 << 20;
/// Most time for its bytes to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

type Shared = State<Arc<Service>>;

/// The endpoints of a service.
pub fn router(service: Arc<Service>, access: Access) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(text_completions))
        .route(
            "/v1/models",
            get(|State(service): Shared| async move { axum::Json(info::models(&service.served)) }),
        )
        .route("/v1/models/{*id}", get(model))
        .route(
            "/props",
            get(|State(service): Shared| async move { axum::Json(info::props(&service.served)) }),
        )
        .route("/slots", get(slots))
        .route("/metrics", get(metrics))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/health", get(async || axum::Json(json!({ "status": "ok" }))))
        .fallback(async || ApiError::not_found("this path"))
        .method_not_allowed_fallback(async || StatusCode::METHOD_NOT_ALLOWED)
        .layer(from_fn_with_state(Arc::new(access), guard))
        .with_state(service)
}

/// Turns away who may not ask.
async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let origin = match access.check_origin(request.headers()) {
        Ok(origin) => origin,
        Err(error) => return error.into_response(),
    };
    let mut response = if is_preflight(request.method(), request.headers()) && origin.is_some() {
        StatusCode::NO_CONTENT.into_response()
    } else if request.uri().path() == "/health" {
        next.run(request).await
    } else {
        match access.check_key(request.headers()) {
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        }
    };
    if let Some(origin) = origin {
        allow(response.headers_mut(), origin);
    }
    response
}

/// The JSON of a request's body.
async fn json_of(body: Body) -> Result<Json, ApiError> {
    let bytes = match tokio::time::timeout(BODY_TIME, to_bytes(body, BODY)).await {
        Err(_) => return Err(ApiError::slow()),
        Ok(Err(_)) => return Err(ApiError::too_large(BODY)),
        Ok(Ok(bytes)) => bytes,
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::request(format!("the body is not JSON: {error}")))
}

async fn chat_completions(State(service): Shared, body: Body) -> Result<Response, ApiError> {
    chat::chat(service, json_of(body).await?).await
}

async fn text_completions(State(service): Shared, body: Body) -> Result<Response, ApiError> {
    completions::complete(service, json_of(body).await?).await
}

async fn model(State(service): Shared, Path(id): Path<String>) -> Result<Response, ApiError> {
    if id == service.served.name {
        Ok(axum::Json(info::model(&service.served)).into_response())
    } else {
        Err(ApiError::not_found("this model"))
    }
}

async fn slots(State(service): Shared) -> Result<Response, ApiError> {
    let stats = service.stats().await?;
    Ok(axum::Json(info::slots(&service.served, &stats)).into_response())
}

async fn metrics(State(service): Shared) -> Result<Response, ApiError> {
    let text = info::metrics(&service.stats().await?);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}

async fn tokenize(State(service): Shared, body: Body) -> Result<Response, ApiError> {
    Ok(axum::Json(info::tokenize(&service.served, &json_of(body).await?)?).into_response())
}

async fn detokenize(State(service): Shared, body: Body) -> Result<Response, ApiError> {
    Ok(axum::Json(info::detokenize(&service.served, &json_of(body).await?)?).into_response())
}
