# it's mine
$model = "Qwen/Qwen-Image"
$env:DATA='C:\a b'
.\venv\Scripts\activate
accelerate launch train_dreambooth_lora_qwen_image.py `
  --pretrained_model_name_or_path=$model `
  --instance_data_dir="$env:DATA"
