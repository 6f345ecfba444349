"""The proof that a split model is the model, and the report on what a split did."""

from tensor_parallel.verify.compare import Check, Verification, verify
from tensor_parallel.verify.report import Report, report

__all__ = ["Check", "Report", "Verification", "report", "verify"]
