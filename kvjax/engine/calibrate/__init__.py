"""Calibration: what a model's own repetitions teach of which KVs will be read.

Here belong the texts that are made up or shipped, the teacher, the fit and where calibrations are
kept. What they are used for is a method's (`kvjax.cache.methods.predicted_reads`); files and
options are the command's.
"""

from kvjax.engine.calibrate.run import CalibrationSettings, Fit, calibrate

__all__ = ["CalibrationSettings", "Fit", "calibrate"]
