"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from max.serve.routers.address import DoorAddress

API_TYPES = frozenset({"openai", "responses", "anthropic", "ollama", "sagemaker", "llama.cpp"})
"""The names of APIs in ``MAX_SERVE_API_TYPES``."""


@dataclass(frozen=True)
class LogSettings:
    """Where the log of a server goes.

    Args:
        file: A file that each line is also written to; None: none.
        prefix: Begins each line.
        structured: Whether a line is a JSON object.
        load_interval_s: Seconds between two lines of level info with the load of a busy engine; 0: none.
    """

    file: str | None = None
    prefix: str = ""
    structured: bool = False
    load_interval_s: float = 3.0


@dataclass(frozen=True)
class WatchLimits:
    """How long a worker may be silent, and take to end.

    Args:
        unhealthy_s: Seconds without a beat after which it is unhealthy.
        restart_s: Seconds without a beat after which it is replaced; 0: it never is.
        step_s: Seconds of one step of the engine after which it is replaced; 0: it never is.
        wait_s: Seconds for which requests wait for the next worker; 0: no limit.
        end_s: Seconds after the loss of its connection until it is killed, if it has not ended by itself.
    """

    unhealthy_s: float = 5.0
    restart_s: float = 30.0
    step_s: float = 600.0
    wait_s: float = 60.0
    end_s: float = 5.0


@dataclass(frozen=True)
class AnswerSettings:
    """What answers are where requests do not say.

    Args:
        reasoning_parser: Whether reasoning is separated from answers: None: where the chat template marks it, ``none``:
            never.
        emit_reasoning_content: The field of OpenAI's chat completions with the reasoning: True: ``reasoning_content``
            alone, False: ``reasoning`` alone, None: both.
        temperature: The temperature; None: the model's.
        top_k: The number of tokens to sample among; None: the model's.
        thinking_temperature: The temperature of tokens of reasoning; None: that of the answer.
    """

    reasoning_parser: str | None = None
    emit_reasoning_content: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    thinking_temperature: float | None = None


@dataclass(frozen=True)
class RaySettings:
    """How a Ray cluster is joined.

    Args:
        address: The cluster's address; None: that of ``RAY_ADDRESS``, else one is started on this machine.
        cpus: The cores of a replica; None: the cluster's cores, divided among the replicas.
    """

    address: str | None = None
    cpus: int | None = None


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server, without those of its model.

    Args:
        host: The address to listen on.
        port: The port; 0: one that is free.
        metrics_port: The port of a second listener for ``/metrics`` only; None: none.
        api_keys: The keys that clients may give; none: no key is needed.
        max_queue: Requests that may wait beyond those that run; more get status 429.
        max_key_requests: Open requests of one API key; more get status 429; None: no limit.
        key_requests_per_minute: Requests a minute of one API key; more get status 429; None: no limit.
        max_request_bytes: The longest body of a request.
        max_open_request_bytes: The longest bodies of all open requests together, but for those of up to 64 KiB.
        request_timeout_s: The longest time of a request; None: no limit.
        graceful_timeout_s: Seconds that open requests get to end after SIGTERM or SIGINT.
        served_model_name: The model's name for clients; None: as ``--model`` has it.
        tls_certificate: A PEM file with the certificate.
        tls_key: A PEM file with its key.
        cors_origins: Origins of web pages that may use the server; none by default.
        share_prefixes: Whether requests of different API keys and tenants share cached prefixes.
        tenant_header: The header that names the tenant of a request, beside its key.
        allowed_hosts: Hosts that the server answers besides its own, from ``checked_host``.
        tool_parser: The format of tool calls; None: as the model's chat template teaches; ``none``: calls stay text.
        answers: What answers are where requests do not say.
        task: What the model must do; None: whatever its architecture does.
        web_page: Whether ``/`` is the chat page.
        api_types: The APIs that it has, of ``API_TYPES``.
        log_requests: Whether each request is logged.
        otlp_endpoint: Where traces are sent, by OTLP over HTTP; None: nothing is traced.
        logs: Where the log goes.
        watch: How long a worker may be silent.
        replicas: The number of engines of each model, the least one where it follows the load.
        max_replicas: The greatest number; None: it does not follow the load.
        ray: How a Ray cluster is joined, whose machines run the engines; None: this machine does.
        check_answers_s: Seconds between two comparisons of the answers of replicas; 0: they are not compared.
        routers: The server processes that share the port; 1: the one that has started the engines is the only one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = 8001
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 512
    max_key_requests: int | None = None
    key_requests_per_minute: float | None = None
    max_request_bytes: int = 32 << 20
    max_open_request_bytes: int = 256 << 20
    request_timeout_s: float | None = None
    graceful_timeout_s: float = 5.0
    served_model_name: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    share_prefixes: bool = False
    tenant_header: str = "X-Tenant-Id"
    allowed_hosts: tuple[str, ...] = ()
    tool_parser: str | None = None
    answers: AnswerSettings = AnswerSettings()
    task: str | None = None
    web_page: bool = True
    api_types: frozenset[str] = API_TYPES
    log_requests: bool = False
    otlp_endpoint: str | None = None
    logs: LogSettings = LogSettings()
    watch: WatchLimits = WatchLimits()
    replicas: int = 1
    max_replicas: int | None = None
    ray: RaySettings | None = None
    check_answers_s: float = 30.0
    routers: int = 1


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker process is started with.

    Args:
        config: The fields of ``PipelineConfig`` that are set.
        log_level: The level of the ``max`` logger.
        logs: Where its log goes.
        unhealthy_s: Seconds without a sign of life after which it is unhealthy.
        cores: The logical CPUs that it runs on; none: those of the server.
        doors: The folder of the socket files of engines that have several server processes; empty: it has one.
        caches: Where the caches of engines on other machines are, which it asks before it compiles or packs.
    """

    config: dict[str, Any]
    log_level: str = "warning"
    logs: LogSettings = LogSettings()
    unhealthy_s: float = WatchLimits.unhealthy_s
    cores: tuple[int, ...] = ()
    doors: str = ""
    caches: tuple[DoorAddress, ...] = field(default=(), repr=False)


CANARY = "@canary"
"""The end of the name of a canary, after that of its model."""


@dataclass(frozen=True)
class DeployedModel:
    """One of several models that a server is started with.

    Args:
        name: Its name for clients.
        worker: The settings of its workers.
        replicas: The number of its engines, the least one where it follows the load.
        max_replicas: The greatest number; None: it does not follow the load.
        cpus: The cores of an engine; None: as many as are left, divided among its engines.
        nodes: The machines of a cluster that run its engines, by address or the begin of an identifier; none: all.
        canary_of: The name of the model whose requests it gets a share of; empty: none.
        share: The share, from 0 to 1.
        by: Whether each request decides by its identifier, or each client by its API key and tenant.
    """

    name: str
    worker: WorkerSettings
    replicas: int = 1
    max_replicas: int | None = None
    cpus: int | None = None
    nodes: tuple[str, ...] = ()
    canary_of: str = ""
    share: float = 0.0
    by: Literal["request", "key"] = "request"
