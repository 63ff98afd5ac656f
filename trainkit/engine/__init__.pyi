from . import scheduler as scheduler
from .scheduler import Engine as Engine, QueueFull as QueueFull, Request as Request
from .scheduler import Scheduler as Scheduler, SlotCache as SlotCache
