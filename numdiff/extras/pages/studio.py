"""`numdiff serve`: a page on which one samples from a model.

A POST of the settings is answered by server-sent events: `queued`, `preview` (the picture while it
forms), `picture` (the PNG with its settings inside) or `fault` (a sentence). The pictures are made
one at a time in the main thread; at most WAITING further requests wait. A browser that closes its
connection ends its own picture, and no other. Nothing is kept when a picture has been sent.
"""

import base64
import contextlib
import gc
import html
import io
import queue
import sys
import threading
import time

from PIL import Image

from ... import schema
from ...diffusion import SAMPLERS, Sampling
from ...diffusion.pictures import as_in_training
from ...diffusion.sampling import to_uint8
from ...errors import NumdiffError, UsageError, printable
from ...files import Refused
from ...option_names import as_options
from ...training.options import resolve_device
from ...training.picture_record import chunk_of, finished
from ...training.sampling import (
    class_indices,
    describe,
    find_decoder,
    find_model,
    load_for_sampling,
    say_how,
    weights_used,
)
from .report import asset, filled, for_script
from .server import Answer, Refusal, Server, Stream, event

WAITING = 8  # requests
PREVIEWS = 4  # that wait for a slow browser
PREVIEW_EVERY = 0.1  # seconds, of pixels
DECODED_EVERY = 2.0  # seconds, of latents, which an autoencoder decodes
ALIVE_EVERY = 1.0  # seconds between two signs of life to a browser that waits
STEPS = 1000
REQUEST = schema.record(
    {
        "class": schema.optional(schema.integer(0, 1 << 24)),
        "seed": schema.integer(0, 2**32 - 1),
        "guidance": schema.optional(schema.number(0, 100)),
        "steps": schema.optional(schema.integer(1, STEPS)),
        "sampler": schema.optional(schema.choice(*SAMPLERS)),
    }
)


class Cancelled(Exception):
    """The browser that asked for a picture has gone."""


class SamplingJob:
    """A picture that is asked for: settings, as REQUEST has them; events, for the browser."""

    def __init__(self, settings):
        self.settings, self.events, self.gone = settings, queue.SimpleQueue(), threading.Event()

    def send(self, name, value):
        """Queue an event. A preview is dropped where the browser has not read those before it, so
        that the main thread never waits for a browser."""
        if name != "preview" or self.events.qsize() < PREVIEWS:
            self.events.put(event(name, value))

    def end(self):
        self.events.put(None)

    def stream(self):
        """Yields the events until the last one; None ends them."""
        while True:
            try:
                part = self.events.get(timeout=ALIVE_EVERY)
            except queue.Empty:
                part = b": waiting\n\n"  # a comment, which finds out that a browser has gone
            if part is None:
                return
            yield part


class Studio:
    """The page of a model and its pictures: `routes` for a `Server`, `work` for the main thread.

    model: as `load_model` gives it; checkpoint: its file; decoder: of latents, or None; device: as
    the command line names it
    """

    def __init__(self, model, checkpoint, weights=None, decoder=None, device="auto"):
        self.model, self.checkpoint, self.weights = model, checkpoint, weights
        self.decoder, self.device = decoder, device
        self._jobs, self._now = queue.Queue(WAITING), None
        self.routes = {("GET", "/"): self.page, ("POST", "/sample"): self.sample}

    # the server's threads -------------------------------------------------------------------------

    def page(self, request):
        sampler, steps, more = self._complete({"sampler": None, "steps": None, "guidance": None})
        names = self.model.meta.get("classes") or []
        classes = [
            printable(names[k], 120) if k < len(names) else f"class {k}"
            for k in range(self.model.num_classes or 0)
        ]
        title = f"{self.checkpoint.parent.name}/{self.checkpoint.name}"
        step = self.model.meta.get("step", 0)
        data = {
            "classes": classes,
            "guided": getattr(self.model, "null_class", None) is not None,
            "samplers": list(SAMPLERS),
            "sampler": sampler,
            "steps": steps,
            "mostSteps": STEPS,
            "guidance": more.get("cfg_scale"),
            "about": f"step {step:,}, {weights_used(self.checkpoint, self.weights, self.model)} weights, "
            f"{self.model.precision}",
        }
        parts = {
            "title": html.escape(printable(title)),
            "style": asset("page.css") + asset("studio.css"),
            "data": for_script(data),
            "script": asset("studio.js"),
        }
        return Answer(filled("studio.html", parts).encode())

    def sample(self, request):
        try:
            settings = schema.check(schema.parse_json(request.body, 4096), REQUEST, "the request")
        except Refused as error:
            raise Refusal(400, f"The request is refused: {error}.") from None
        classes = self.model.num_classes or 0
        if settings["class"] is not None and settings["class"] >= classes:
            raise Refusal(400, f"The model has no class {settings['class']}: it has {classes}.")
        job = SamplingJob(settings)
        job.send("queued", {"before": self._jobs.qsize() + (self._now is not None)})
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Refusal(
                429, f"{WAITING} pictures are waiting: try again when some of them are done."
            ) from None
        return Stream(job.stream(), job.gone.set)

    # the main thread ------------------------------------------------------------------------------

    def work(self, ended=lambda: False):
        """Make the pictures that are asked for, one after another, until `ended()`."""
        while not ended():
            with contextlib.suppress(queue.Empty):
                self._now = self._jobs.get(timeout=0.1)
                try:
                    self._make(self._now)
                finally:
                    self._now = None

    def _make(self, job):
        try:
            if not job.gone.is_set():
                job.send("picture", self.picture(job))
        except Cancelled:
            pass
        except NumdiffError as error:
            job.send("fault", str(error))
        except MemoryError:
            job.send("fault", "There is no memory left for this picture.")
        finally:
            job.end()
            gc.collect()  # a Sampling and its runs refer to each other

    def _complete(self, settings):
        """(sampler, steps, further arguments) of a request: what it leaves open is as in training."""
        more = {} if settings["guidance"] is None else {"cfg_scale": settings["guidance"]}
        return *as_in_training(self.model, settings["sampler"], settings["steps"], None, more), more

    def picture(self, job):
        """{"png": base64, "caption": text, "name": of a file} of a job."""
        settings, began = job.settings, time.perf_counter()
        sampler, steps, more = self._complete(settings)
        label = settings["class"]
        if self.model.num_classes and label is None:
            label = settings["seed"] % self.model.num_classes
        with as_options():
            sampling = Sampling(
                self.model,
                count=1,
                steps=steps,
                sampler=sampler,
                seed=settings["seed"],
                y=label,
                batch=1,
                **more,
            )
        shown = [-1.0]

        def look():
            if job.gone.is_set():
                raise Cancelled

        def watch(rows, k, x_t):
            look()
            now = time.perf_counter()
            if now - shown[0] < (DECODED_EVERY if self.decoder else PREVIEW_EVERY):
                return
            shown[0] = now
            from ...device import download

            image = (self.decoder or to_uint8)(download(x_t))[0]
            job.send(
                "preview",
                {"png": encoded(image), "step": k, "of": sampling.evaluations},
            )

        ((_, images),) = sampling.batches(look, watch)
        image = (self.decoder(images) if self.decoder else images)[0]
        record = describe(sampling, self.model, self.checkpoint, self.weights)
        seconds = time.perf_counter() - began
        command = self._command(settings, sampler, steps, label, more)
        record = finished(record, sampling.labels, 1, seconds, self.decoder, command)
        del record["classes"]
        return {
            "png": encoded(image, record),
            "caption": ", ".join(
                [
                    *(printable(str(name), 120) for name, _ in record["class_counts"]),
                    say_how(sampling),
                ]
            )
            + f", {seconds:.1f} s",
            "name": f"numdiff-{settings['seed']}.png",
        }

    def _command(self, settings, sampler, steps, label, more):
        """The words of the command that makes the picture again."""
        words = ["numdiff", "sample", str(self.checkpoint), "--count", "1"]
        words += ["--seed", str(settings["seed"]), "--sampler", sampler, "--steps", str(steps)]
        if label is not None:
            words += ["--class", class_word(label, self.model)]
        if more.get("cfg_scale") is not None:
            words += ["--cfg-scale", f"{more['cfg_scale']:g}"]
        if more.get("cfg_interval"):
            words += ["--cfg-interval", ",".join(f"{v:g}" for v in more["cfg_interval"])]
        words += ["--device", self.device, "--precision", self.model.precision]
        if self.weights:
            words += ["--weights", self.weights]
        if self.decoder:
            words += ["--vae", str(self.decoder.path)]
        return [*words, "--grid", "again.png"]


def class_word(index, model):
    """How `numdiff sample --class` names a class: by its name, which may look like another index,
    where that means this class alone."""
    names = model.meta.get("classes") or []
    with contextlib.suppress(UsageError):
        if index < len(names) and class_indices(names[index], model) == [index]:
            return names[index]
    return str(index)


def encoded(image, record=None):
    """The base64 text of a PNG of an image, uint8 (H, W, C). record: how it was made."""
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(
        file, "PNG", compress_level=1, pnginfo=record and chunk_of(record)
    )
    return base64.b64encode(file.getvalue()).decode()


def serve_model(
    run,
    host,
    port,
    vae=None,
    weights=None,
    device="auto",
    precision="auto",
    outdir="runs",
    echo=print,
):
    """Serve until Ctrl-C. Prints the address. run: as `sample_command` takes it."""
    device = resolve_device(device)
    checkpoint = find_model(run, outdir, echo)
    with Server({}, host, port) as server:  # first: a busy port is found before a model is read
        model = load_for_sampling(checkpoint, device, weights, precision, None, echo)
        decoder = find_decoder(vae, model, device)
        if model.in_channels not in (1, 3) and decoder is None:
            raise UsageError(
                f"the model makes latents of {model.in_channels} channels, which are no picture: give the "
                "--vae FILE that decodes them."
            )
        studio = Studio(model, checkpoint, weights, decoder, device)
        server.routes.update(studio.routes)
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        echo(f"serving   {server.url} (Ctrl-C ends it)")
        if not server.local:
            print(
                f"note: every machine that reaches {host} can use this page.",
                file=sys.stderr,
                flush=True,
            )
        try:
            studio.work()
        except KeyboardInterrupt:
            echo("ended")
        finally:
            server.shutdown()
            thread.join()
