"""The records of reports: their formats, their command, and the figure of a plan."""

from dataclasses import dataclass

from llama_ssp.reports.formats import ReportFormat
from llama_ssp.settings.commands import Command
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import PlanConfig

HTML = ReportFormat(
    name="html",
    write="llama_ssp.extensions.reports.html:report",
    file="report.html",
    order=1,
    purpose="the same with plots",
    remedy="llama-ssp report writes report.html later",
)
CSV = ReportFormat(name="csv", write="llama_ssp.extensions.reports.tables:runs_to_csv", file="runs.csv", order=2)
MARKDOWN = ReportFormat(name="markdown", write="llama_ssp.extensions.reports.papers:to_markdown", order=3)
LATEX = ReportFormat(name="latex", write="llama_ssp.extensions.reports.papers:to_latex", order=4)

COMMAND = Command(
    name="report",
    usage="FOLDER... [figure=FILE | --output=DIR | --table=FORM]",
    purpose="a page of figures and tables of finished runs",
    order=4,
    run="llama_ssp.extensions.reports.command:main",
    of_sweeps="makes one report",
)


@dataclass(kw_only=True)
class FigureOfPlan(PlanConfig):
    """A plan, which may be drawn."""

    figure: str | None = setting(
        None, "a file (.png, .svg, .pdf): memory by rank, ms/token by K; of a search ms/token by GPUs."
    )


FIGURE = MoreSettings(
    name="reports", config=FigureOfPlan, paths=("figure",), draw="llama_ssp.extensions.reports.plan_figures:draw"
)
