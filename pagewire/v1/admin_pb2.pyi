import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ("timeout", "engine")
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    engine: str
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., engine: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_unfinished",)
    NUM_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    num_unfinished: int
    def __init__(self, num_unfinished: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks_freed",)
    NUM_BLOCKS_FREED_FIELD_NUMBER: _ClassVar[int]
    num_blocks_freed: int
    def __init__(self, num_blocks_freed: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("num_requests_in_flight", "num_requests_running", "num_requests_waiting", "num_blocks", "num_free_blocks", "kv_cache_usage", "engine_epoch", "engine_step", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "engine_ready", "draining", "engine_pid", "engines")
    NUM_REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    num_requests_in_flight: int
    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    kv_cache_usage: float
    engine_epoch: int
    engine_step: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    engine_ready: bool
    draining: bool
    engine_pid: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineStats]
    def __init__(self, num_requests_in_flight: _Optional[int] = ..., num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., engine_epoch: _Optional[int] = ..., engine_step: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., engine_ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., engine_pid: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineStats, _Mapping]]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "max_adapters")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_adapters: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_adapters: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "rank", "num_requests_in_flight", "is_static")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_STATIC_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    rank: int
    num_requests_in_flight: int
    is_static: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., num_requests_in_flight: _Optional[int] = ..., is_static: _Optional[bool] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("address", "ready", "draining", "epoch", "step", "pid", "num_requests_running", "num_requests_waiting", "num_blocks", "num_free_blocks", "num_requests_in_flight")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    address: str
    ready: bool
    draining: bool
    epoch: int
    step: int
    pid: int
    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_requests_in_flight: int
    def __init__(self, address: _Optional[str] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., pid: _Optional[int] = ..., num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_requests_in_flight: _Optional[int] = ...) -> None: ...
