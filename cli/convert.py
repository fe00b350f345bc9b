"""`numdiff convert`: weights of other programs into numdiff's model files, and back."""
import click


@click.command("convert", no_args_is_help=True)
@click.argument("source", type=click.Path(), metavar="IN")
@click.argument("target", type=click.Path(dir_okay=False), metavar="OUT")
@click.option("--weights", type=click.Choice(["ema", "raw"]), default="ema", show_default=True,
              help="Which weights to take where IN holds both: averaged, or as trained.")
@click.option("--image-size", type=click.IntRange(1, 4096), metavar="PX", help="Side of the images of the model.")
@click.option("--num-head-channels", type=click.IntRange(1, 4096), metavar="N", help="Channels of an attention head.")
@click.option("--num-heads", type=click.IntRange(1, 4096), metavar="N",
              help="Number of attention heads, instead of --num-head-channels.")
@click.option("--num-heads-upsample", type=click.IntRange(1, 4096), metavar="N",
              help="Another number of heads on the way up.  [default: as --num-heads]")
@click.option("--attention-order", type=click.Choice(["legacy", "new"]),
              help="Order of the qkv channels: guided-diffusion's default, or its use_new_attention_order.  "
                   "[default: legacy]")
@click.option("--max-period", type=click.FloatRange(0, min_open=True), metavar="STEPS",
              help="Longest period of the timestep embedding.  [default: 10000; unet.cu's 1000 where IN is its]")
@click.option("--diffusion-steps", type=click.IntRange(1, 100000), metavar="N",
              help="Timesteps it was trained with.  [default: 1000]")
@click.option("--schedule", type=click.Choice(["linear", "cosine"]),
              help="Noise schedule it was trained with.  [default: linear]")
@click.option("--prediction", type=click.Choice(["eps", "v", "x_0"]), help="What it predicts.  [default: eps]")
def convert(source, target, weights, image_size, num_head_channels, num_heads, num_heads_upsample, attention_order,
            max_period, diffusion_steps, schedule, prediction):
    """Write the UNet weights in IN as OUT.

    IN is a state dict of guided-diffusion's UNet (.pt of torch.save, .npz or .safetensors), unet.cu's .bin, or a
    numdiff checkpoint or run folder. A .pt is read without PyTorch, and nothing in it is run. OUT ends in .h5 for a
    numdiff model file (`numdiff sample` takes it), or in .npz or .safetensors for guided-diffusion's names and
    PyTorch's layout.

    The sizes of the model are seen from the weights. What weights do not show must be said, unless IN is unet.cu's or
    numdiff's own: the image size and the attention heads.

    \b
    numdiff convert 64x64_diffusion.pt imagenet64.h5 --image-size 64 --num-head-channels 64 \\
        --attention-order new --schedule cosine
    numdiff convert model_100000.bin unet-cu.h5
    numdiff convert runs/00000-unet64 weights.safetensors
    """
    from numdiff.training.model_files import convert as convert_model

    diffusion = {"steps": diffusion_steps, "schedule": schedule, "prediction": prediction}
    result = convert_model(source, target, weights, diffusion,
                           image_size=image_size, num_head_channels=num_head_channels, num_heads=num_heads,
                           num_heads_upsample=num_heads_upsample,
                           use_new_attention_order=None if attention_order is None else attention_order == "new",
                           max_period=max_period)
    o = result.options
    heads = f"{o['num_heads']} heads" if o["num_head_channels"] == -1 else f"{o['num_head_channels']} channels a head"
    order = "new" if o["use_new_attention_order"] else "legacy"
    click.echo(f"{target}: a UNet of {result.parameters:,} parameters for {o['image_size']}×{o['image_size']} images")
    click.echo(f"channels    {o['model_channels']} × ({', '.join(f'{m:g}' for m in o['channel_mult'])}), "
               f"{o['num_res_blocks']} blocks a level")
    sizes = ", ".join(map(str, o["attention_resolutions"])) or "the middle only"
    click.echo(f"attention   at {sizes}; {heads}, {order} order")
    click.echo(f"classes     {o['num_classes'] or 'none'}")
