"""Launches of a step as one CUDA graph, built node by node: the host starts a step with a single call.

Every launch waits for the one before it: before it is started, or, where both are kernels and the later one's code
waits itself (programmatic dependent launch), within it, so that its blocks are placed while the one before still runs.
What changes from step to step is read from memory, so a graph is never changed after it was built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .cuda_kernels import CudaKernels
from .cuda_memory import CudaContext
from .gpu_plan import BoundLaunch


class StepGraph:
    """The launches of one token bucket. timed: events are recorded before the first launch and after each one, and no
    launch begins before the one ahead has ended; neither does one with overlap=False."""

    def __init__(self, context: CudaContext, kernels: CudaKernels, launches: Sequence[BoundLaunch],
                 timed: bool = False, overlap: bool = True) -> None:
        self._context = context
        driver = context.driver
        self._events = [context.event(timed=True) for _ in range(len(launches) + 1)] if timed else []
        graph = driver.call("cuGraphCreate", 0)
        try:
            last: list[Any] = []
            for index, launch in enumerate(launches):
                if timed:
                    last = [driver.call("cuGraphAddEventRecordNode", graph, last, len(last), self._events[index])]
                if overlap and not timed and last and launch.kernel.programmatic_launch:
                    node = _kernel_node(context, kernels, launch, graph, [])
                    driver.call("cuGraphAddDependencies", graph, last, [node], [_programmatic(driver)], 1)
                else:
                    node = _kernel_node(context, kernels, launch, graph, last)
                last = [node]
            if timed:
                driver.call("cuGraphAddEventRecordNode", graph, last, len(last), self._events[-1])
            self._exec = context.own(driver.call("cuGraphInstantiate", graph, 0), "cuGraphExecDestroy")
        finally:
            driver.call("cuGraphDestroy", graph)
        driver.call("cuGraphUpload", self._exec, context.stream)

    def launch(self) -> None:
        self._context.driver.call("cuGraphLaunch", self._exec, self._context.stream)

    def durations(self) -> np.ndarray:
        """i64 [launches], the ns of each launch of a timed graph that has run. Includes what an event takes, and what
        lies between two launches; the clock of events ticks every half microsecond or so."""
        driver = self._context.driver
        marks = zip(self._events, self._events[1:], strict=False)
        return np.array([round(1e6 * float(driver.call("cuEventElapsedTime", begin, end))) for begin, end in marks],
                        np.int64)


def _programmatic(driver: Any) -> Any:
    """An edge on which the later kernel may be started as soon as all blocks of the earlier one allow it."""
    edge = driver.api.CUgraphEdgeData()
    edge.from_port = driver.api.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    edge.type = driver.enum("CUgraphDependencyType", "CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC")
    return edge


def _kernel_node(context: CudaContext, kernels: CudaKernels, launch: BoundLaunch, graph: Any, last: list[Any]) -> Any:
    driver, kernel = context.driver, launch.kernel
    parameters = kernels.parameters(launch)  # copied by the call
    node = driver.api.CUDA_KERNEL_NODE_PARAMS()
    node.func = kernels.function(kernel)
    node.gridDimX, node.gridDimY, node.gridDimZ = _blocks(launch)
    node.blockDimX, node.blockDimY, node.blockDimZ = kernel.threads, 1, 1
    node.sharedMemBytes = kernel.shared_bytes
    node.kernelParams = parameters.address
    added = driver.call("cuGraphAddKernelNode", graph, last, len(last), node)
    for name, value in _attributes(context, launch, driver.api.CUkernelNodeAttrValue):
        driver.call("cuGraphKernelNodeSetAttribute", added, driver.enum("CUkernelNodeAttrID", name), value)
    return added


def launch_alone(context: CudaContext, kernels: CudaKernels, launch: BoundLaunch) -> None:
    """One launch, in the stream, without a graph."""
    driver, kernel = context.driver, launch.kernel
    parameters = kernels.parameters(launch)
    config = driver.api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _blocks(launch)
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.hStream = context.stream
    attributes = []
    for name, value in _attributes(context, launch, driver.api.CUlaunchAttributeValue):
        attribute = driver.api.CUlaunchAttribute()
        attribute.id, attribute.value = driver.enum("CUlaunchAttributeID", name), value
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    driver.call("cuLaunchKernelEx", config, kernels.function(kernel), parameters.address, 0)


def _blocks(launch: BoundLaunch) -> tuple[int, int, int]:
    """Triton counts clusters where the driver counts blocks."""
    x, y, z = launch.grid
    return x * launch.kernel.cluster, y, z


def _attributes(context: CudaContext, launch: BoundLaunch, kind: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Of a kernel whose blocks run in clusters: names and values, which nodes and launches have different types for."""
    if launch.kernel.cluster == 1:
        return []
    size, policy = kind(), kind()
    size.clusterDim.x, size.clusterDim.y, size.clusterDim.z = launch.kernel.cluster, 1, 1
    policy.clusterSchedulingPolicyPreference = context.driver.enum("CUclusterSchedulingPolicy",
                                                                   "CU_CLUSTER_SCHEDULING_POLICY_SPREAD")
    return [("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", size),
            ("CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE", policy)]
