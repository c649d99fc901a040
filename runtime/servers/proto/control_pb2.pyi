from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetEngineInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("hash", "model_name", "architecture", "target", "precision", "ingot_version", "built_by", "limits", "kv_cache", "tokenizer_sha256")
    HASH_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    INGOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BUILT_BY_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    hash: str
    model_name: str
    architecture: str
    target: str
    precision: str
    ingot_version: str
    built_by: str
    limits: Limits
    kv_cache: KvCache
    tokenizer_sha256: str
    def __init__(self, hash: _Optional[str] = ..., model_name: _Optional[str] = ..., architecture: _Optional[str] = ..., target: _Optional[str] = ..., precision: _Optional[str] = ..., ingot_version: _Optional[str] = ..., built_by: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., kv_cache: _Optional[_Union[KvCache, _Mapping]] = ..., tokenizer_sha256: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_queue_size", "vocab_size")
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_queue_size: int
    vocab_size: int
    def __init__(self, max_batch_size: _Optional[int] = ..., max_num_tokens: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., max_queue_size: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class KvCache(_message.Message):
    __slots__ = ("block_size", "num_blocks", "num_host_blocks", "bytes_per_token", "guaranteed_requests")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    num_blocks: int
    num_host_blocks: int
    bytes_per_token: int
    guaranteed_requests: int
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., guaranteed_requests: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("completed",)
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    completed: bool
    def __init__(self, completed: bool = ...) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("health", "uptime_s", "num_running", "num_waiting", "num_paused", "num_used_blocks", "num_cached_blocks", "num_free_blocks", "num_used_host_blocks", "requests_received", "requests_finished", "requests_refused", "requests_paused", "steps", "prompt_tokens", "generated_tokens", "computed_tokens", "prefix_cache", "queue_time", "inter_token_latency", "time_to_first_token")
    class Health(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HEALTH_UNSPECIFIED: _ClassVar[Statistics.Health]
        HEALTH_SERVING: _ClassVar[Statistics.Health]
        HEALTH_DRAINING: _ClassVar[Statistics.Health]
        HEALTH_FAILED: _ClassVar[Statistics.Health]
        HEALTH_STOPPED: _ClassVar[Statistics.Health]
    HEALTH_UNSPECIFIED: Statistics.Health
    HEALTH_SERVING: Statistics.Health
    HEALTH_DRAINING: Statistics.Health
    HEALTH_FAILED: Statistics.Health
    HEALTH_STOPPED: Statistics.Health
    class RequestsFinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RequestsRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TimeToFirstTokenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Duration
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Duration, _Mapping]] = ...) -> None: ...
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PAUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_LATENCY_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    health: Statistics.Health
    uptime_s: float
    num_running: int
    num_waiting: int
    num_paused: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_used_host_blocks: int
    requests_received: int
    requests_finished: _containers.ScalarMap[str, int]
    requests_refused: _containers.ScalarMap[str, int]
    requests_paused: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    prefix_cache: PrefixCache
    queue_time: Duration
    inter_token_latency: Duration
    time_to_first_token: _containers.MessageMap[str, Duration]
    def __init__(self, health: _Optional[_Union[Statistics.Health, str]] = ..., uptime_s: _Optional[float] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_paused: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_used_host_blocks: _Optional[int] = ..., requests_received: _Optional[int] = ..., requests_finished: _Optional[_Mapping[str, int]] = ..., requests_refused: _Optional[_Mapping[str, int]] = ..., requests_paused: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., prefix_cache: _Optional[_Union[PrefixCache, _Mapping]] = ..., queue_time: _Optional[_Union[Duration, _Mapping]] = ..., inter_token_latency: _Optional[_Union[Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Mapping[str, Duration]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class PrefixCache(_message.Message):
    __slots__ = ("query_tokens", "hit_tokens", "miss_tokens", "evicted_blocks")
    class MissTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    query_tokens: int
    hit_tokens: int
    miss_tokens: _containers.ScalarMap[str, int]
    evicted_blocks: int
    def __init__(self, query_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., miss_tokens: _Optional[_Mapping[str, int]] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class Duration(_message.Message):
    __slots__ = ("count", "total_s")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    count: int
    total_s: float
    def __init__(self, count: _Optional[int] = ..., total_s: _Optional[float] = ...) -> None: ...

class LoadEngineRequest(_message.Message):
    __slots__ = ("engine", "options")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    options: LoadOptions
    def __init__(self, engine: _Optional[str] = ..., options: _Optional[_Union[LoadOptions, _Mapping]] = ...) -> None: ...

class RollbackEngineRequest(_message.Message):
    __slots__ = ("steps", "options")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    options: LoadOptions
    def __init__(self, steps: _Optional[int] = ..., options: _Optional[_Union[LoadOptions, _Mapping]] = ...) -> None: ...

class LoadOptions(_message.Message):
    __slots__ = ("if_serving", "kv_cache_tokens", "host_kv_tokens", "allow_other_tokenizer")
    IF_SERVING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_OTHER_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    if_serving: str
    kv_cache_tokens: int
    host_kv_tokens: int
    allow_other_tokenizer: bool
    def __init__(self, if_serving: _Optional[str] = ..., kv_cache_tokens: _Optional[int] = ..., host_kv_tokens: _Optional[int] = ..., allow_other_tokenizer: bool = ...) -> None: ...

class LoadEngineResponse(_message.Message):
    __slots__ = ("hash_before", "hash", "trial", "wait_s", "load_s", "trial_s", "kv_cache_tokens", "wanted_kv_tokens", "num_finishing")
    class Trial(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TRIAL_UNSPECIFIED: _ClassVar[LoadEngineResponse.Trial]
        TRIAL_NONE: _ClassVar[LoadEngineResponse.Trial]
        TRIAL_RECORDED: _ClassVar[LoadEngineResponse.Trial]
        TRIAL_SMOKE: _ClassVar[LoadEngineResponse.Trial]
        TRIAL_RETURNED: _ClassVar[LoadEngineResponse.Trial]
    TRIAL_UNSPECIFIED: LoadEngineResponse.Trial
    TRIAL_NONE: LoadEngineResponse.Trial
    TRIAL_RECORDED: LoadEngineResponse.Trial
    TRIAL_SMOKE: LoadEngineResponse.Trial
    TRIAL_RETURNED: LoadEngineResponse.Trial
    HASH_BEFORE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    TRIAL_S_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANTED_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHING_FIELD_NUMBER: _ClassVar[int]
    hash_before: str
    hash: str
    trial: LoadEngineResponse.Trial
    wait_s: float
    load_s: float
    trial_s: float
    kv_cache_tokens: int
    wanted_kv_tokens: int
    num_finishing: int
    def __init__(self, hash_before: _Optional[str] = ..., hash: _Optional[str] = ..., trial: _Optional[_Union[LoadEngineResponse.Trial, str]] = ..., wait_s: _Optional[float] = ..., load_s: _Optional[float] = ..., trial_s: _Optional[float] = ..., kv_cache_tokens: _Optional[int] = ..., wanted_kv_tokens: _Optional[int] = ..., num_finishing: _Optional[int] = ...) -> None: ...

class GetSwapStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwapStatus(_message.Message):
    __slots__ = ("engines", "phase", "loading", "history", "results", "last_error")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_IDLE: _ClassVar[SwapStatus.Phase]
        PHASE_CHECKING: _ClassVar[SwapStatus.Phase]
        PHASE_LOADING: _ClassVar[SwapStatus.Phase]
    PHASE_IDLE: SwapStatus.Phase
    PHASE_CHECKING: SwapStatus.Phase
    PHASE_LOADING: SwapStatus.Phase
    class ResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[LoadedEngine]
    phase: SwapStatus.Phase
    loading: str
    history: _containers.RepeatedScalarFieldContainer[str]
    results: _containers.ScalarMap[str, int]
    last_error: str
    def __init__(self, engines: _Optional[_Iterable[_Union[LoadedEngine, _Mapping]]] = ..., phase: _Optional[_Union[SwapStatus.Phase, str]] = ..., loading: _Optional[str] = ..., history: _Optional[_Iterable[str]] = ..., results: _Optional[_Mapping[str, int]] = ..., last_error: _Optional[str] = ...) -> None: ...

class LoadedEngine(_message.Message):
    __slots__ = ("hash", "target", "precision", "num_requests", "kv_cache_tokens")
    HASH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hash: str
    target: str
    precision: str
    num_requests: int
    kv_cache_tokens: int
    def __init__(self, hash: _Optional[str] = ..., target: _Optional[str] = ..., precision: _Optional[str] = ..., num_requests: _Optional[int] = ..., kv_cache_tokens: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    sha256: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "sha256", "rank", "num_modules")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_MODULES_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    rank: int
    num_modules: int
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., rank: _Optional[int] = ..., num_modules: _Optional[int] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("adapters", "max_rank", "num_slots", "bytes_per_slot")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_rank: int
    num_slots: int
    bytes_per_slot: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_rank: _Optional[int] = ..., num_slots: _Optional[int] = ..., bytes_per_slot: _Optional[int] = ...) -> None: ...
