from . import bugs as bugs, invariants as invariants, report as report, trainers as trainers
from .bugs import BUGS as BUGS
from .invariants import INVARIANTS as INVARIANTS, Proof as Proof, Fit as Fit
from .invariants import Invariant as Invariant, Subject as Subject
from .report import Audit as Audit, AuditFinding as AuditFinding, find_subject as find_subject
from .report import run_audit as run_audit, write_audit_page as write_audit_page
from .trainers import AuditedTRL as AuditedTRL, AuditedTrainkit as AuditedTrainkit
from .trainers import AuditedLitGPT as AuditedLitGPT, NanoGPTLoop as NanoGPTLoop
from .trainers import AuditedTransformers as AuditedTransformers, PlainLoop as PlainLoop
