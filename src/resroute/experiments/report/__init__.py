"""The report of a set of runs: figures, tables, and a page that needs nothing but itself."""

from resroute.experiments.report.page import Report as Report
from resroute.experiments.report.tables import groups_table as groups_table
from resroute.experiments.report.text import terminal_table as terminal_table
from resroute.experiments.report.write import make_report as make_report
from resroute.experiments.report.write import save_report as save_report
from resroute.experiments.report.write import write_report as write_report
