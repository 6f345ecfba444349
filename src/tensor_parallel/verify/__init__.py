"""The proof that a split model is the model, and the report on what a split did."""

from tensor_parallel.verify.checks import Check, Verification
from tensor_parallel.verify.compare import verify
from tensor_parallel.verify.report import Report, report

__all__ = ["Check", "Report", "Verification", "report", "verify"]
