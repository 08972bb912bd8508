"""What fits, how fast it can be, and why: computed from sizes alone, before anything is loaded.

memory        bytes of weights, pages and the rest; largest batch, longest context
roofline      FLOPs and bytes per operator group; lower bounds for times; levers
utilization   MFU and MBU of what an engine has done
simulate      queueing, with the engine's own scheduler and allocator on a simulated clock
engine_plan   what the engine will allocate here, or why it cannot (`check`, which `resolve` calls)
measure       bounds against this machine (imports the engine, so it is not imported here)
"""

from jaxinfer.tools.planner.engine_plan import EnginePlan, PlanError, check
from jaxinfer.tools.planner.plan import Plan, make_plan

__all__ = ["EnginePlan", "Plan", "PlanError", "check", "make_plan"]
