from . import constraints as constraints, responses as responses, scheduler as scheduler
from . import server as server, stored_weights as stored_weights
from .constraints import Constraint as Constraint, ConstraintError as ConstraintError
from .constraints import Grammars as Grammars
from .responses import ResponseStore as ResponseStore, ResponseWriter as ResponseWriter
from .scheduler import BatchEngine as BatchEngine, Piece as Piece, QueueFull as QueueFull
from .scheduler import Request as Request, Scheduler as Scheduler, SlotCache as SlotCache
from .server import APIError as APIError, ChatServer as ChatServer
from .server import ServerConfig as ServerConfig, running as running, serve as serve
from .stored_weights import StoredMatrix as StoredMatrix, StoredWeights as StoredWeights
