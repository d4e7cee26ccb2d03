"""Problems, schedules and plans: in which order everything is summed, and which chain starts when. Needs numpy alone.

Mask and shape become a Problem, of which a generator makes a Schedule, which is lowered to a Plan.
"""

from .generators import GENERATORS, SCHEDULES, ScheduleName, generate
from .plan import Plan, lower
from .problem import Problem, Task
from .schedule import Placement, Schedule

__all__ = ["GENERATORS", "SCHEDULES", "Placement", "Plan", "Problem", "Schedule", "ScheduleName", "Task", "generate", "lower"]
